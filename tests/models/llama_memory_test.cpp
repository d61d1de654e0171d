// The laws of memory for drawn models of the Llama family and drawn configurations.
#include <gtest/gtest.h>

#include "memory_checks.h"
#include "tests/core/rounds.h"
#include "tests/core/sweep.h"

namespace tranche::models {
namespace {

/// A model whose step is quick; everything else is drawn.
MemoryCase llama_case(std::uint64_t index) {
  Draw draw(34, index);
  MemoryCase drawn;
  LlamaConfig& model = drawn.llama.emplace();
  model.kind = draw.of({LlamaKind::llama, LlamaKind::mistral, LlamaKind::qwen2, LlamaKind::qwen3});
  model.layers = 1 + draw.below(4);
  model.key_value_heads = 1 + draw.below(3);
  model.heads = model.key_value_heads * (1 + draw.below(3));
  model.head_dim = 2 * (1 + draw.below(8));
  model.width = model.heads * (4 + draw.below(9));
  model.inner = 1 + draw.below(90);
  model.vocabulary = 2 + draw.below(300);
  model.positions = 1 + draw.below(24);
  model.tied = draw.flip();
  model.attention_dropout = draw.flip() ? 0.1f : 0.0f;
  if (model.kind == LlamaKind::llama) model.attention_bias = draw.flip();
  if (model.kind != LlamaKind::llama && draw.flip()) model.window = 1 + draw.below(8);
  drawn.sequence = 1 + draw.below(model.positions);
  draw_configuration(draw, {"model.norm.weight", "model.layers.0.mlp.*", "*.k_proj.*", "*layernorm*"}, drawn);
  return drawn;
}

TEST(LlamaMemory, PlansHoldToTheByte) {
  const test::Sweep cases = test::sweep({0, 16});
  test::AxesMet axes;
  for (std::uint64_t index = cases.first; index < cases.end(); ++index) {
    const MemoryCase drawn = llama_case(index);
    axes.meet("kind", drawn.llama->kind);
    axes.meet("stage", drawn.config.stage);
    axes.meet("tied", drawn.llama->tied);
    axes.meet("checkpointing", drawn.config.activation_checkpointing);
    axes.meet("window", drawn.llama->window > 0);
  }
  axes.expect("kind", {LlamaKind::llama, LlamaKind::mistral, LlamaKind::qwen2, LlamaKind::qwen3});
  axes.expect("stage", {0, 1, 2, 3});
  for (const char* axis : {"tied", "checkpointing", "window"}) axes.expect(axis, {false, true});
  expect_plans_hold(llama_case, cases);
}

TEST(LlamaMemorySlow, PlansHoldToTheByteOverMany) {
  expect_plans_hold(llama_case, test::sweep({16, 100}));
}

}  // namespace
}  // namespace tranche::models
