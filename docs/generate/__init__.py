"""The reference pages, written from the code: `make reference`, or `python -m generate` in docs/.

Each module makes one page and gives its text; `__main__` writes them. A test compares the text with what is checked in.
"""
