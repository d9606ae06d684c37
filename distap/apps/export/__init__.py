"""Write a trained network in formats that other programs load, each compared with the network
first.
"""
