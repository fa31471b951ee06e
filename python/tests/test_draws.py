"""The random numbers of transforms, by the rules of docs/transforms.md."""

import unittest

import support  # noqa: F401 (sets the path)

from shoal import Batch, _draws


class Numbers(unittest.TestCase):
    def test_philox(self):
        # The vectors that its authors publish (Random123's kat_vectors).
        for counter, key, want in (
            ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
            ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
            ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
             (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
        ):
            self.assertEqual(_draws.philox(counter, key), want)

    def test_packing(self):
        r = _draws.Rand(seed=0x299F31D0A4093822, epoch=0x13198A2E, sample=0x85A3243F6A88, occurrence=0x08D3,
                        operation=0x0370)
        block = [_draws.philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03700000 + k), (0xA4093822, 0x299F31D0))
                 for k in range(2)]
        want = [w[i + 1] << 32 | w[i] for w in block for i in (0, 2)]
        self.assertEqual([r.uint64() for _ in range(4)], want)
        for n in (1, 2, 3, 7, 1 << 63, (1 << 63) + 1):
            self.assertTrue(all(0 <= r.below(n) < n for _ in range(50)))
        self.assertTrue(all(0 <= r.float64() < 1 for _ in range(50)))

    def test_beside(self):
        # Boxes and masks follow the picture's operations, which keep their places.
        picture = "Resize(size=8, interpolation='bilinear', max_size=None, antialias=True)|RandomHorizontalFlip(p=0.5)|uint8|nchw"
        joint = "Detection(boxes='json', keys=('a|b', 'c'))|Segmentation(mask='png')|" + picture
        for sample in range(9):
            drawn = [_draws.draw(_draws.parse(spec), 1, 2, sample, 0, (30, 20)) for spec in (picture, joint)]
            self.assertEqual(*drawn)

    def test_linspace(self):
        # What torch 2 has on processors that multiply and add in one step; the rounding of two steps has 16.0 and
        # 169.99999.
        self.assertEqual(_draws.linspace(0, 32, 31, 15), 15.999999046325684)
        self.assertEqual(255 * _draws.linspace(1, 0, 10, 3), 170.0000050663948)
        self.assertEqual(_draws.magnitude(_draws.WIDE, "Solarize", 31, 2, (9, 9), False), 238.0)
        self.assertNotEqual(_draws.magnitude(_draws.WIDE, "Solarize", 31, 2, (9, 9), True), 238.0)

    def test_views(self):
        operations = _draws.parse("RandomHorizontalFlip(p=0.5)|RandomApply(transforms=[RandomCrop(size=(4, 4), "
                                  "padding=None, pad_if_needed=False), "
                                  "GaussianBlur(kernel_size=(3, 3), sigma=(0.1, 2.0))], "
                                  "p=0.5)|RandomChoice(transforms=[RandomInvert(p=1.0), Grayscale("
                                  "num_output_channels=3)], p=(1.0, 3.0))|RandomErasing(p=1.0, scale=(0.02, 0.33), "
                                  "ratio=(0.3, 3.3), value=(0.0, 0.0, 0.0))|uint8")
        drawn = [_draws.draw(operations, 1, 2, sample, 0, (30, 20), view) for sample in range(400) for view in (0, 1)]
        self.assertEqual(drawn[::2], [_draws.draw(operations, 1, 2, sample, 0, (30, 20)) for sample in range(400)])
        for each in drawn:
            (_, apply), (_, choice) = each[1:3]
            self.assertEqual([name for name, _ in apply["transforms"]],
                             ["RandomCrop", "GaussianBlur"] if apply["apply"] else [])
            self.assertEqual([name for name, _ in choice["transforms"]],
                             [["RandomInvert", "Grayscale"][choice["choice"]]])
        self.assertLess(sum(a == b for a, b in zip(drawn[::2], drawn[1::2])), 5)
        self.assertTrue(340 < sum(each[1][1]["apply"] for each in drawn) < 460)
        self.assertTrue(530 < sum(each[2][1]["choice"] for each in drawn) < 670)

    def test_unknown(self):
        operations = _draws.parse("RandomRotation(degrees=(-1.0, 1.0), interpolation='nearest', expand=True, "
                                  "center=None, fill=(0, 0, 0))|uint8")
        with self.assertRaisesRegex(ValueError, "expand"):
            _draws.draw(operations, 0, 0, 0, 0, (3, 3))
        with self.assertRaisesRegex(ValueError, "Perspective"):
            _draws.draw(_draws.parse("RandomPerspective(p=0.5)"), 0, 0, 0, 0, (3, 3))
        with self.assertRaisesRegex(ValueError, "no params"):
            Batch(None, None, None, None, 0, 0).params


if __name__ == "__main__":
    unittest.main()
