"""What the programs of the suite train on: real data that is at hand, synthesised scenes and scores.

Nothing is downloaded, and everything is the same each time that it is read.
"""
