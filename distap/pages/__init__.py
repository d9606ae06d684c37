"""HTML pages that distap writes or serves; their markup is in templates/, as Jinja2."""
