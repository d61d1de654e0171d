#include "tranche/training/batch_feeder.h"

#include <cstring>
#include <utility>

#include "tranche/core/shape.h"

namespace tranche::training {

BatchFeeder::BatchFeeder(Engine& engine, std::int64_t vocabulary, const training::BatchShape& shape,
                         std::int64_t sequence, bool documents)
    : engine_(engine),
      shape_(shape),
      vocabulary_(vocabulary),
      sequence_(sequence),
      places_(static_cast<std::size_t>(engine.stage().stages > 1 ? engine.config().accumulation_steps : 1)),
      documents_wanted_(documents) {
  const std::int64_t bytes = checked_multiply(checked_multiply(shape.micro_batch, sequence), 4);
  for (Place& place : places_) take(place, bytes);
  const Device& device = engine.device();
  if (device.host_accessible() || device.kind() == DeviceKind::meta) return;
  const auto places = engine.config().accumulation_steps + 1;
  staging_ =
      Buffer(engine.runtime().memory(Tier::host), checked_multiply(places, (documents ? 4 : 2) * bytes),
             Category::other, "batches on their way");
  staged_.resize(static_cast<std::size_t>(places));
}

void BatchFeeder::take(Place& place, std::int64_t bytes) {
  MemoryResource& memory = engine_.runtime().memory(Tier::device);
  place.tokens = Buffer(memory, bytes, Category::other, "tokens of a micro-batch");
  place.targets = Buffer(memory, bytes, Category::other, "targets of a micro-batch");
  if (!documents_wanted_) return;
  place.begin = Buffer(memory, bytes, Category::other, "documents of a micro-batch");
  place.positions = Buffer(memory, bytes, Category::other, "positions of a micro-batch");
}

models::TokenBatch BatchFeeder::training_batch(const training::Windows& windows,
                                               const training::Mixture& mixture, std::int64_t number) {
  const Mesh& mesh = engine_.runtime().mesh();
  const int rank = mesh.data_rank(engine_.runtime().rank());
  const std::vector<std::int64_t> samples = training::sample_numbers(shape_, engine_.samples(), number, rank);
  std::vector<std::int64_t> numbers;
  const bool counts = rank < engine_.config().ranks_with_samples(number, mesh.data_ranks());
  // A rank without samples gets rows without targets, so that it makes the same calls as the others.
  for (const std::int64_t sample : samples) numbers.push_back(counts ? mixture.window(sample) : -1);
  return fill(windows, numbers, samples);
}

models::TokenBatch BatchFeeder::fill(const training::Windows& windows,
                                     const std::vector<std::int64_t>& numbers,
                                     std::vector<std::int64_t> samples) {
  // The copies are ordered after earlier work on the stream, which reads the same buffers.
  Stream& stream = engine_.compute_stream();
  training::read_windows(windows, numbers, vocabulary_, tokens_, targets_,
                         documents_wanted_ ? &documents_ : nullptr);
  if (places_.size() > 1 || engine_.stage().stages > 1) {
    // Engine::set_batch() may have changed the number of micro-batches.
    const auto wanted = static_cast<std::size_t>(engine_.config().accumulation_steps);
    while (places_.size() < wanted) take(places_.emplace_back(), places_.front().tokens.bytes());
  }
  Place& into = places_[next_];
  next_ = (next_ + 1) % places_.size();
  into.samples = std::move(samples);
  const Shape shape{static_cast<std::int64_t>(numbers.size()), sequence_};
  auto* place = static_cast<std::byte*>(staging_.data());
  if (staging_) {
    staged_[place_].wait();
    place += static_cast<std::ptrdiff_t>(place_) * (documents_wanted_ ? 4 : 2) * into.tokens.bytes();
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
  const ConstTensorView tokens = copy(into.tokens, tokens_), targets = copy(into.targets, targets_);
  models::TokenBatch batch{tokens, targets, into.samples};
  if (documents_wanted_) {
    batch.document_begin = copy(into.begin, documents_.begin);
    batch.positions = copy(into.positions, documents_.positions);
  }
  if (staging_) {
    staged_[place_] = stream.record();
    place_ = (place_ + 1) % staged_.size();
  }
  return batch;
}

}  // namespace tranche::training
