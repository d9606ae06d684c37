"""Files on disks and behind URLs: reads, retries, caches, atomic writes."""
