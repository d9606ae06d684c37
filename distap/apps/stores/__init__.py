"""Copies of an index in stores that search by themselves: LanceDB, Qdrant, pgvector."""
