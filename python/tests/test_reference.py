"""docs/python-api.md is what the docstrings say."""

import os
import subprocess
import sys
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


class Reference(unittest.TestCase):
    def test_is_what_make_docs_prints(self):
        printed = subprocess.run([sys.executable, "-B", os.path.join(ROOT, "python", "reference.py")], check=True,
                                 stdout=subprocess.PIPE,
                                 env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "python")},
                                 encoding="utf-8").stdout
        with open(os.path.join(ROOT, "docs", "python-api.md"), encoding="utf-8") as f:
            self.assertEqual(f.read(), printed, "run `make docs`")


if __name__ == "__main__":
    unittest.main()
