"""Pages of the documentation that are made of the code's own descriptions.

``protocol`` makes the reference of the wire when the site is built (``scripts/site``). ``stored``
makes the pages below ``docs/reference``, which are kept in the repository for readers of GitHub:
``scripts/reference`` writes them, and a test finds those that are stale.
"""
