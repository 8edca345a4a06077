"""Which host a machine goes to: request, filters, score, reserve, explain.

The one rule: pure functions turn a request into SQL expressions over the host row; `reserve` runs them in one statement,
so that what was checked is what is taken.
"""
