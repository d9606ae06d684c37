"""Use a trained network (export, search, serve), and write a first recipe for one's own images."""
