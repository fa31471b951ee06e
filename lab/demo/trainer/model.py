"""The small network and the step that both trainers share."""

import torch
from torch import nn


def build(classes):
    """A few convolutions over 224x224 pixels: little compute, so that the data path decides."""

    def block(cin, cout, kernel, stride):
        return [nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(cout), nn.ReLU()]

    return nn.Sequential(
        *block(3, 16, 7, 4), *block(16, 32, 3, 2), *block(32, 64, 3, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),
    )


class Trainer:
    def __init__(self, classes, seed):
        torch.manual_seed(seed)
        # One thread computes: the other core is left to the data path, as a GPU would leave both.
        torch.set_num_threads(1)
        self.model = build(classes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.loss = nn.CrossEntropyLoss()

    def step(self, images, labels):
        """Trains on one batch and returns the loss."""
        self.optimizer.zero_grad()
        loss = self.loss(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.item()
