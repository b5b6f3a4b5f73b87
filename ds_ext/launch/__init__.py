"""Start, end and failure reports of a rank."""
