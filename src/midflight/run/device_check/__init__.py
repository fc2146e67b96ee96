"""The check of a device for `midflight doctor --device`: every path that computes, moves weights or
talks between processes is tried there, small first and then in real size.
"""
