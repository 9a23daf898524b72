"""Stand-in."""
class _C:
    def __init__(s, store): s.store=store
    def put(s, t):
        h=s.store.put(t.detach().contiguous())
        return h
def catalog_of(store): return _C(store)
