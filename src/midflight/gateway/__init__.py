"""Station 2: requests of any wire format become token ids, find an engine, and get one unbroken
answer.
"""
