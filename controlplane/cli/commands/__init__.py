"""Commands that belong to no noun: each module exports `app`, whose commands are mounted as `bedplate <command>`.

The one rule: these modules are imported by every call, so they import heavy things inside their functions.
"""
