"""The beginning of a program that tells how it ends: whether exit handlers run, and whether modules are taken down."""

TELLS_HOW_IT_ENDS = """
import atexit, os, sys

class Imported:
    def __del__(self, write=os.write):
        write(2, b"taken down")

imported = Imported()
"""
