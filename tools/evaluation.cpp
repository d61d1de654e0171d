#include "tools/evaluation.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "tranche/core/random.h"
#include "tranche/core/shape.h"

namespace tranche::tools {

BatchFeeder::BatchFeeder(Engine& engine, std::int64_t vocabulary, const data::BatchShape& shape,
                         std::int64_t sequence, bool documents)
    : engine_(engine), shape_(shape), vocabulary_(vocabulary), sequence_(sequence) {
  const std::int64_t bytes = checked_multiply(checked_multiply(shape.micro_batch, sequence), 4);
  MemoryResource& memory = engine.runtime().memory(Tier::device);
  device_tokens_ = Buffer(memory, bytes, Category::other, "tokens of a micro-batch");
  device_targets_ = Buffer(memory, bytes, Category::other, "targets of a micro-batch");
  if (documents) {
    device_begin_ = Buffer(memory, bytes, Category::other, "documents of a micro-batch");
    device_positions_ = Buffer(memory, bytes, Category::other, "positions of a micro-batch");
  }
  const Device& device = engine.device();
  if (device.host_accessible() || device.kind() == DeviceKind::meta) return;
  const auto places = engine.config().accumulation_steps + 1;
  staging_ =
      Buffer(engine.runtime().memory(Tier::host), checked_multiply(places, (documents ? 4 : 2) * bytes),
             Category::other, "batches on their way");
  staged_.resize(static_cast<std::size_t>(places));
}

models::TokenBatch BatchFeeder::fill(const data::Windows& windows, const std::vector<std::int64_t>& numbers,
                                     std::vector<std::int64_t> samples) {
  // The copies are ordered behind the micro-batch before, which reads the same buffers.
  Stream& stream = engine_.compute_stream();
  data::read_windows(windows, numbers, vocabulary_, tokens_, targets_, device_begin_ ? &documents_ : nullptr);
  samples_ = std::move(samples);
  const Shape shape{static_cast<std::int64_t>(numbers.size()), sequence_};
  auto* place = static_cast<std::byte*>(staging_.data());
  if (staging_) {
    staged_[place_].wait();
    place += static_cast<std::ptrdiff_t>(place_) * (device_begin_ ? 4 : 2) * device_tokens_.bytes();
  }
  const auto copy = [&](const Buffer& device, const std::vector<std::int32_t>& host) {
    const void* from = host.data();
    const std::size_t bytes = host.size() * sizeof(std::int32_t);
    if (staging_) {
      std::memcpy(place, from, bytes);
      from = place;
      place += device.bytes();
    }
    engine_.device().copy_from_host(stream, device.data(), from, static_cast<std::int64_t>(bytes));
    return ConstTensorView(device.data(), DataType::int32, shape);
  };
  const ConstTensorView tokens = copy(device_tokens_, tokens_), targets = copy(device_targets_, targets_);
  models::TokenBatch batch{tokens, targets, samples_};
  if (device_begin_) {
    batch.document_begin = copy(device_begin_, documents_.begin);
    batch.positions = copy(device_positions_, documents_.positions);
  }
  if (staging_) {
    staged_[place_] = stream.record();
    place_ = (place_ + 1) % staged_.size();
  }
  return batch;
}

EvaluationResult evaluate_windows(Engine& engine, const models::LanguageModel& model, BatchFeeder& feeder,
                                  const data::Windows& windows, const std::vector<std::int64_t>& numbers,
                                  const EvaluationProgress& progress) {
  const std::int64_t ranks = feeder.shape().ranks, rank = engine.runtime().rank();
  const std::int64_t micro_batch = feeder.shape().micro_batch;
  const auto count = static_cast<std::int64_t>(numbers.size());
  const std::int64_t rounds = divide_round_up(count, ranks * micro_batch);
  engine.begin_evaluation();
  if (progress) progress(0, count);
  for (std::int64_t round = 0; round < rounds; ++round) {
    std::vector<std::int64_t> mine(static_cast<std::size_t>(micro_batch));
    for (std::int64_t i = 0; i < micro_batch; ++i) {
      // Slots past the end are rows without targets, so that all ranks make the same calls.
      const std::int64_t slot = (round * ranks + rank) * micro_batch + i;
      mine[static_cast<std::size_t>(i)] = slot < count ? numbers[static_cast<std::size_t>(slot)] : -1;
    }
    model.evaluate(engine, feeder.fill(windows, mine, mine));
    if (progress) progress(std::min(count, (round + 1) * ranks * micro_batch), count);
  }
  return engine.end_evaluation();
}

std::string sample_text(Engine& engine, const models::LanguageModel& model, std::string_view prompt,
                        std::int64_t count, std::int64_t context, double temperature, std::uint64_t seed) {
  std::vector<std::int32_t> tokens;
  for (const char c : prompt) tokens.push_back(static_cast<unsigned char>(c));
  std::string text;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::vector<double> probabilities = model.next_token_probabilities(
        engine, std::span(tokens).last(std::min(tokens.size(), static_cast<std::size_t>(context))),
        temperature);
    const double draw = random_uniform({seed, RandomPurpose::sampling, 0}, static_cast<std::uint64_t>(i));
    double sum = 0;
    std::size_t chosen = 0;
    // Bytes only; the last one with any probability when rounding leaves the draw above the sum.
    for (std::size_t k = 0; k < std::min<std::size_t>(probabilities.size(), 256); ++k) {
      if (probabilities[k] <= 0) continue;
      chosen = k;
      sum += probabilities[k];
      if (draw < sum) break;
    }
    tokens.push_back(static_cast<std::int32_t>(chosen));
    text.push_back(static_cast<char>(static_cast<unsigned char>(chosen)));
  }
  return text;
}

}  // namespace tranche::tools
