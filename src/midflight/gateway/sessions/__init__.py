"""Sessions: their secrets, what was said in them as token trees, and the rows that are made of
those.
"""
