"""The engines: which one takes a request, who holds requests back, and what a pause is."""
