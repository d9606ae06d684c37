"""Processes of a training: how ranks start, meet, are watched and stop."""
