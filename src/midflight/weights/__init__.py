"""Station 7: a version's bytes on their way from the trainer to the engines, and the handover that
makes them live.
"""
