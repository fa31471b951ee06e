import os
import unittest
from unittest import mock

from shoal import _trace

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Headers(unittest.TestCase):
    def of(self, **environment):
        with mock.patch.dict(os.environ, environment):
            return _trace.headers()

    def test_environment(self):
        self.assertEqual(self.of(), ())
        self.assertEqual(self.of(TRACEPARENT=PARENT), (("traceparent", PARENT),))
        self.assertEqual(self.of(TRACEPARENT=PARENT, TRACESTATE="a=1,b=2"),
                         (("traceparent", PARENT), ("tracestate", "a=1,b=2")))
        self.assertEqual(self.of(TRACESTATE="a=1"), ())

    def test_what_is_no_context_is_left_out(self):
        """gRPC refuses a call whose metadata has other characters: a stream must not fail for a trace."""
        for wrong in ("", "x", PARENT[:-1], PARENT.upper(), PARENT + "\n", "00-\xe9", PARENT + " "):
            self.assertEqual(self.of(TRACEPARENT=wrong), (), wrong)
        for wrong in ("a=\xe9", "a=\n", "x" * 513):
            self.assertEqual(self.of(TRACEPARENT=PARENT, TRACESTATE=wrong), (("traceparent", PARENT),), wrong)


if __name__ == "__main__":
    unittest.main()
