"""Ways for the bytes of a version to travel. The publisher's end is the trainer's, the receiver's
end is given to engines.
"""
