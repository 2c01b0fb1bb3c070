"""A head of EAGLE-3: one layer that reads hidden states of three layers of its model.

    hidden states before three layers, joined -> projection: kept of each token -> norm -+
                                                                                        +- joined -> attention
                                                     token behind -> embedding -> norm -+

The residual begins as what is kept, or as its norm. The layer's output, before the last norm, is in the place
of what is kept where the next guess is made.

Source: EAGLE-3, arXiv:2503.01840; names and options as vLLM and speculators have them.

Shapes: T tokens, N tokens that are sampled, H numbers of a hidden state, V tokens of the model's
vocabulary, D of the head's own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRMSNorm

from worker.model.layer_shards import CUT_BY_HEADS
from worker.speculation.head_layer import DraftHead

_JOINED = ("q_proj", "k_proj", "v_proj")


class EagleLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """The layer, of an embedding and a hidden state [1, T, 2H]; a trial's rows [1, T, H] are both."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, layer_idx=0)
        for name in _JOINED:
            num_outputs, bias = getattr(self.self_attn, name).out_features, config.attention_bias
            setattr(self.self_attn, name, nn.Linear(2 * self.hidden_size, num_outputs, bias=bias))
        setattr(self.self_attn, CUT_BY_HEADS, True)
        self.hidden_norm = LlamaRMSNorm(self.hidden_size, config.rms_norm_eps)
        self._norms_before_residual = config.norm_before_residual

    def forward(self, inputs: Tensor, **options: Any) -> Tensor:
        embeds_1TH, hidden_1TH = inputs[..., : self.hidden_size], inputs[..., -self.hidden_size :]
        normed_1TH = self.hidden_norm(hidden_1TH)
        residual_1TH = normed_1TH if self._norms_before_residual else hidden_1TH
        joined = torch.cat([self.input_layernorm(embeds_1TH), normed_1TH], -1)
        residual_1TH = residual_1TH + self.self_attn(hidden_states=joined, **options)[0]
        output_1TH: Tensor = residual_1TH + self.mlp(self.post_attention_layernorm(residual_1TH))
        return output_1TH


class EagleBody(LlamaModel):  # type: ignore[misc]
    """The layer as a model without an output layer, whose outputs are not normed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers, self.norm = nn.ModuleList([EagleLayer(config)]), nn.Identity()
        self.has_own_layer = True


class EagleHead(DraftHead):
    """DraftHead of EAGLE-3: it reads states before some layers, and guesses from a vocabulary of its own."""

    def __init__(self, config: Any, target_size: int, vocab_size: int) -> None:
        """Take in the size of a hidden state of the model, and the tokens that it samples."""
        nn.Module.__init__(self)
        self.body = EagleBody(config)
        self.fc = nn.Linear(3 * target_size, config.hidden_size, bias=False)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.linears = tuple(name for name, each in self.named_modules() if type(each) is nn.Linear)
        self.tapped, self._vocab_size = tuple(config.tapped), vocab_size
        self.token_ids_D: Tensor
        self.register_buffer("token_ids_D", torch.arange(0), persistent=False)  # it goes to the device
        """The model's number of each token that is guessed."""

    def inputs(self, embeds_TH: Tensor, hidden_TH: Tensor) -> Tensor:
        """Join embeddings of tokens with what is kept before them, [1, T, 2H]."""
        return torch.cat([embeds_TH, hidden_TH], -1).unsqueeze(0)

    @torch.inference_mode()
    def kept(self, states_TH: Tensor) -> Tensor:
        """Project the joined states of three layers."""
        kept_TH: Tensor = self.fc(states_TH)
        return kept_TH

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Compute logits [N, V]; tokens that the head does not guess have none."""
        logits_ND: Tensor = self.lm_head(self.norm(hidden_NH))
        logits_NV = logits_ND.new_full((len(logits_ND), self._vocab_size), -torch.inf)
        return logits_NV.index_copy_(1, self.token_ids_D, logits_ND)
