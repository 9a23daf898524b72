"""Models of every kind that planning has to take apart: small, but large enough that a generator state (5 KB) is noise.

Each entry of `KINDS` is a factory of (model, step). Tensors between blocks are 256 x 64 floats: 65536 bytes.
"""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, ROWS, WORDS = 64, 256, 50


def inputs(*shape):
    return torch.randn(*(shape or (ROWS, WIDTH)), generator=torch.Generator().manual_seed(1))


def words():
    return torch.randint(WORDS, (8, 32), generator=torch.Generator().manual_seed(1))


def square(y):
    return (y**2).mean()


def linear():
    return nn.Linear(WIDTH, WIDTH)


def block():
    return nn.Sequential(linear(), nn.GELU(), linear())


class Loop(nn.Module):
    def __init__(self, blocks=4, inter_call=None):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.inter_call = inter_call

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.inter_call is not None:
                x = self.inter_call(x)
        return x


class InPlaceRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.c(self.relu(self.b(self.relu(self.a(x)))))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = block(), linear()

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Loop(2)
        make = nn.TransformerDecoderLayer
        self.decoder = nn.ModuleList(make(WIDTH, 2, 128, batch_first=True, dropout=0.0) for _ in range(2))
        self.head = linear()

    def forward(self, x):
        memory, y = self.encoder(x), x
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(y)


class Returns(nn.Module):
    """Returns what `kind` makes of its result and its hidden state."""

    def __init__(self, kind):
        super().__init__()
        self.body, self.head, self.kind = Loop(), linear(), kind

    def forward(self, x):
        hidden = self.body(x)
        return self.kind(self.head(hidden), hidden)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), Loop()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, t):
        return self.head(self.body(self.embed(t)))


class LowRank(nn.Module):
    """A frozen linear with a trained update of rank 4."""

    def __init__(self):
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return F.gelu(self.base(x) + self.up(self.down(x)))


class Frozen(nn.Module):
    """A frozen embedding and first block, then low-rank updates of frozen weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.first = block().requires_grad_(False)
        self.layers = nn.ModuleList(LowRank() for _ in range(4))

    def forward(self, t):
        x = self.first(self.embed(t))
        for layer in self.layers:
            x = layer(x)
        return x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = linear()

    def forward(self, x):
        return self.head(self.gru(self.lstm(x)[0])[0])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.between = block()

    def forward(self, x):
        x = self.between(x + self.a(x, x, x, need_weights=False)[0])
        return x + self.b(x, x, x, need_weights=False)[0]


class PartlyWithoutGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = Loop(2), Loop()

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) - target


def on_rows(make, step=lambda model, x: square(model(x))):
    def factory():
        torch.manual_seed(0)
        x = inputs()
        return make(), lambda model: step(model, x)

    return factory


def on_sequences(make, step=lambda model, x: square(model(x))):
    def factory():
        torch.manual_seed(0)
        x = inputs(8, 32, WIDTH)
        return make(), lambda model: step(model, x)

    return factory


def on_words(make, step=lambda model, t: square(model(t))):
    def factory():
        torch.manual_seed(0)
        t = words()
        return make(), lambda model: step(model, t)

    return factory


def _sequential(*parts, times=4):
    return nn.Sequential(*(part() for _ in range(times) for part in parts))


def _both(model, x):
    found = model(x)
    return square(found["y"]) + square(found["hidden"][0])


def _encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 128, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


KINDS = {
    "loop": on_rows(Loop),
    "glue in place": on_rows(lambda: Loop(inter_call=lambda h: h.add_(1))),
    "glue": on_rows(lambda: Loop(inter_call=lambda h: h.sin())),
    "shared in-place relu": on_rows(InPlaceRelu),
    "sequential": on_rows(lambda: _sequential(linear, nn.GELU)),
    "sequential in place": on_rows(lambda: _sequential(linear, lambda: nn.ReLU(inplace=True))),
    "nested sequentials": on_rows(
        lambda: _sequential(lambda: nn.Sequential(nn.Sequential(linear(), nn.GELU()), linear()))
    ),
    "shared weights": on_rows(Shared),
    "encoder and decoder": on_sequences(EncoderDecoder),
    "returns a dict": on_rows(lambda: Returns(lambda y, h: {"y": y, "hidden": (h,)}), _both),
    "returns a tuple": on_rows(lambda: Returns(lambda y, h: (y, h)), lambda m, x: square(m(x)[0])),
    "tied": on_words(Tied),
    "frozen and low rank": on_words(Frozen),
    "recurrent": on_sequences(Recurrent),
    "attention": on_sequences(Attention),
    "encoder layers": on_sequences(_encoder),
    "transformer": on_sequences(
        lambda: nn.Transformer(WIDTH, 2, 2, 2, 128, batch_first=True), lambda m, x: square(m(x, x.flip(1)))
    ),
    "partly without grad": on_rows(PartlyWithoutGrad),
    "submodules alone": on_rows(Loop, lambda m, x: square(m.layers[1](m.layers[0](x)))),
    "siamese": on_rows(Loop, lambda m, x: square(m(x) - m(x.flip(0)))),
    "the same submodule twice": on_rows(Loop, lambda m, x: square(m.layers[0](m.layers[0](x)))),
    "one linear": on_rows(linear),
}

# Those whose step calls the model, or parts of it, more than once.
SEVERAL_ROOTS = {"submodules alone", "siamese", "the same submodule twice"}
