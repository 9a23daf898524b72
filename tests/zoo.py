"""Models of `transformers` with random weights: small sizes, but the real classes.

Each factory returns a model in training mode and a step that gives its loss on one fixed batch.
"""

import torch
import transformers
from torch.nn import functional as F

BATCH, TIME, VOCABULARY = 4, 64, 512


def _tokens(*shape):
    # 0 and 1 are left out: several of the configurations use them for padding.
    return torch.randint(2, VOCABULARY, shape)


def gpt2(*, blocks=4, width=128, dropout=0.0, use_cache=None):
    """GPT-2; its configuration asks for a cache unless `use_cache` is given, and then also in training."""
    torch.manual_seed(0)
    extra = {} if use_cache is None else {"use_cache": use_cache}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TIME,
        n_layer=blocks,
        n_embd=width,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        **extra,
    )
    tokens = _tokens(BATCH, TIME)
    return transformers.GPT2LMHeadModel(config).train(), lambda model: model(input_ids=tokens, labels=tokens).loss


def llama(*, blocks=4, width=128, dropout=0.0):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=TIME,
        num_hidden_layers=blocks,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        use_cache=False,
    )
    tokens = _tokens(BATCH, TIME)
    return transformers.LlamaForCausalLM(config).train(), lambda model: model(input_ids=tokens, labels=tokens).loss


def bert(*, blocks=4, width=128, dropout=0.0):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=TIME,
        num_hidden_layers=blocks,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    tokens = _tokens(BATCH, TIME)
    mask = torch.ones_like(tokens)
    return transformers.BertForMaskedLM(
        config
    ).train(), lambda model: model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


def vit(*, blocks=4, width=128, dropout=0.0):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=64,
        patch_size=8,
        num_hidden_layers=blocks,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=10,
    )
    images = torch.randn(BATCH, 3, 64, 64)
    labels = torch.randint(10, (BATCH,))
    return transformers.ViTForImageClassification(config).train(), lambda model: F.cross_entropy(
        model(pixel_values=images).logits, labels
    )


def t5(*, blocks=4, width=128, dropout=0.0):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        num_layers=blocks,
        num_decoder_layers=blocks,
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_heads=4,
        dropout_rate=dropout,
        use_cache=False,
        decoder_start_token_id=0,
    )
    source, target = _tokens(BATCH, TIME), _tokens(BATCH, TIME)
    return transformers.T5ForConditionalGeneration(
        config
    ).train(), lambda model: model(input_ids=source, labels=target).loss


ZOO = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "t5": t5}
