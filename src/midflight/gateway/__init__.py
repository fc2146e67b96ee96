"""Station 2: turns requests of any wire format into token ids, finds an engine for them, and gives
each one unbroken answer.
"""
