import random
import unittest

from support import sample  # noqa: F401 (sets the path)

from shoal import _wire


class Codec(unittest.TestCase):
    def test_golden(self):
        # protoc --encode=shoal.feed.v1.ClientMessage, of open{order:"uniform" batch:300 seed:2^64-1 rebatch:true}
        got = _wire.encode(_wire.CLIENT_MESSAGE,
                           open=dict(order="uniform", batch=300, seed=(1 << 64) - 1, rebatch=True, rank=0))
        self.assertEqual(got.hex(), "0a19" "1a07" + b"uniform".hex() + "20ac02" "40ffffffffffffffffff01" "7801")
        self.assertEqual(_wire.encode(_wire.CLIENT_MESSAGE, credit=dict(n=1)).hex(), "12020801")
        self.assertEqual(_wire.encode(_wire.CLIENT_MESSAGE, credit={}).hex(), "1200")

    def test_slots(self):
        got = _wire.encode(_wire.CLIENT_MESSAGE, release=dict(slots=[3, 300]))
        self.assertEqual(got.hex(), "1a05" "0803" "08ac02")
        got = _wire.encode(_wire.CLIENT_MESSAGE, open=dict(slots=7, readonly=True, device="cuda:0"))
        self.assertEqual(got.hex(), "0a0f" "900107" "980101" "a20106" + b"cuda:0".hex())
        pool = dict(key="k", slots=4, slot_bytes=1 << 20, device="")
        self.assertEqual(vars(_wire.decode(_wire.OPENED, _wire.encode(_wire.OPENED, pool=pool)).pool), pool)
        self.assertIsNone(_wire.decode(_wire.OPENED, b"").pool)
        self.assertEqual(_wire.decode(_wire.BATCH_HEADER, bytes.fromhex("4805")).slot, 5)

    def test_planes_are_decoded_once(self):
        def header(offset):
            return _wire.encode(_wire.BATCH_HEADER,
                                planes=[dict(name="data", shape=[2], offset=offset), dict(name="label", shape=[2])])

        first, again, other = (_wire.decode(_wire.BATCH_HEADER, header(n)).planes for n in (64, 64, 128))
        self.assertTrue(all(a is b for a, b in zip(first, again)))
        self.assertEqual([p.offset for p in first + other], [64, 0, 128, 0])
        for n in range(1000):  # raw samples' are never the same
            self.assertEqual(_wire.decode(_wire.BATCH_HEADER, header(n)).planes[0].offset, n)
        self.assertLessEqual(len(_wire.BATCH_HEADER[6].memo), 256)

    def test_round_trip(self):
        values = dict(name="größe", dtype="uint8", shape=[256, 3, 0, 1 << 40], offset=64, length=(1 << 64) - 1)
        got = _wire.decode(_wire.PLANE, _wire.encode(_wire.PLANE, **values))
        self.assertEqual(vars(got), values)

    def test_packed_and_unpacked(self):
        for hexed in ("1a0303ac02", "180318ac02"):
            self.assertEqual(_wire.decode(_wire.PLANE, bytes.fromhex(hexed)).shape, [3, 300])

    def test_defaults_and_unknown_fields(self):
        # Unknown: varint 100, fixed64 101, bytes 102, fixed32 103; then index 7.
        data = bytes.fromhex("a00601" "a9060102030405060708" "b2060161" "bd0601020304" "0807")
        got = _wire.decode(_wire.BATCH_HEADER, data)
        self.assertEqual((got.index, got.rows, got.planes, got.state), (7, 0, [], ""))
        self.assertIsNone(_wire.decode(_wire.SERVER_MESSAGE, b"").opened)

    def test_chunk(self):
        payload = bytes(range(200))
        message = bytes.fromhex("1acb01" "0ac801") + payload
        self.assertEqual(bytes(_wire.chunk(message)), payload)
        self.assertEqual(bytes(_wire.chunk(b"\x1a\x00")), b"")
        for other in (b"", b"\x12\x00", message + b"\x00", bytes.fromhex("1a02" "1001")):
            self.assertIsNone(_wire.chunk(other))

    def test_garbage_is_an_error_or_a_message(self):
        rng = random.Random(1)
        good = _wire.encode(_wire.OPENED, session="s", planes=[dict(name="data", shape=[1, 2])], state="{}")
        for _ in range(20000):
            data = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            try:
                _wire.decode(_wire.OPENED, bytes(data[: rng.randrange(len(data) + 1)]))
            except ValueError:  # WireError, UnicodeDecodeError
                pass

    def test_numbers_that_do_not_fit(self):
        for value in (-1, 1 << 64):
            with self.assertRaises(ValueError):
                _wire.encode(_wire.CREDIT, n=value)


if __name__ == "__main__":
    unittest.main()
