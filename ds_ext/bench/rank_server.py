"""Preloaded by the server that ranks are forked from, which then ends with the process that started it.

By itself it would live as long as a rank does, and a rank that is stopped as long as its server.
"""

from .ranks import end_with_parent

end_with_parent()
