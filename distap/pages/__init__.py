"""Every HTML page that distap writes."""
