from tests.fakes import invariants_hold

__all__ = ["invariants_hold"]
