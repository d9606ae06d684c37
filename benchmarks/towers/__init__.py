"""Memory of a rank that trains a tower of billions of parameters, measured and predicted."""
