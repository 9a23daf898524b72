// Cells of RNNs, which a device computes in one kernel: the CPU has none for them, so here they are, for the fallback
// of kernels.cpp to call.
//
// A workspace holds what the backward needs. Formulas and layouts are those of torch's RNN.cu.
#include "tensors.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <tuple>

namespace emulated {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor plus(const Tensor& gates, const MaybeTensor& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor or_zeros(const MaybeTensor& gradient, const Tensor& like) {
  return gradient && gradient->defined() ? *gradient : like.new_zeros(like.sizes());
}
Tensor side_by_side(const std::vector<Tensor>& parts) { return at::cat(parts, 1); }
Tensor through_sigmoid(const Tensor& y) { return (1 - y) * y; }
Tensor through_tanh(const Tensor& y) { return 1 - y * y; }

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                        const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  auto gates = (plus(input_gates, input_bias) + plus(hidden_gates, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, side_by_side({in, forget, cell, out})};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(const MaybeTensor& grad_hy, const MaybeTensor& grad_cy,
                                                 const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                 bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  auto to_hy = or_zeros(grad_hy, cx), y = cy.tanh();
  auto to_cy = to_hy * out * through_tanh(y) + or_zeros(grad_cy, cx);
  auto to_gates = side_by_side({to_cy * cell * through_sigmoid(in), to_cy * cx * through_sigmoid(forget),
                                to_cy * in * through_tanh(cell), to_hy * y * through_sigmoid(out)});
  return {to_gates, to_cy * forget, has_bias ? to_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                               const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  auto input = plus(input_gates, input_bias).chunk(3, 1), hidden = plus(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  auto fresh = (input[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh), side_by_side({reset, update, fresh, hx, hidden[2]})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
  auto to_update = grad_hy * (hx - fresh) * through_sigmoid(update);
  auto to_fresh = grad_hy * (1 - update) * through_tanh(fresh);
  auto to_reset = to_fresh * hidden * through_sigmoid(reset);
  auto to_input = side_by_side({to_reset, to_update, to_fresh});
  auto to_hidden = side_by_side({to_reset, to_update, to_fresh * reset});
  return {to_input, to_hidden, grad_hy * update, has_bias ? to_input.sum(0) : Tensor(),
          has_bias ? to_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_backward);
  m.impl("_thnn_fused_gru_cell", &gru);
  m.impl("_thnn_fused_gru_cell_backward", &gru_backward);
}

}  // namespace
}  // namespace emulated
