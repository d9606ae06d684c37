"""The parts of a run: build them from a recipe, save and restore their state, report their
progress.
"""
