"""Measure what a network retrieves from data sets: describe their images once, then rank with each
refinement.
"""
