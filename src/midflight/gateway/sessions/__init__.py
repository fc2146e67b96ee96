"""Sessions: their secrets, their token trees, and the rows that are made of these."""
