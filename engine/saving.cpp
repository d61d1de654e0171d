// Saving and loading: what a rank keeps, handed to checkpoint/ by section, unit and global range.

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "tranche/checkpoint/reader.h"
#include "tranche/checkpoint/shard_writer.h"
#include "tranche/engine/engine_impl.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/offload/aligned_buffer.h"

namespace tranche {

using nlohmann::ordered_json;

namespace {

constexpr OperationLabel save_label{"checkpoint", "save", Traffic::control, Tier::host};

/// Every rank's text on every rank. Collective.
std::vector<std::string> exchange_texts(Communicator& ranks, const std::string& mine) {
  const auto count = static_cast<std::size_t>(ranks.size());
  const auto size = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> sizes(count, size);
  ranks.all_gather(&size, sizes.data(), 1, DataType::int64, 0, {}, save_label).wait();
  const auto largest = static_cast<std::size_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::string padded = mine;
  padded.resize(largest);
  std::string all(largest * count, '\0');
  for (std::size_t r = 0; r < count; ++r) all.replace(r * largest, largest, padded);
  if (largest > 0) {
    ranks
        .all_gather(padded.data(), all.data(), static_cast<std::int64_t>(largest), DataType::uint8, 0, {},
                    save_label)
        .wait();
  }
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < count; ++r) {
    texts.push_back(all.substr(r * largest, static_cast<std::size_t>(sizes[r])));
  }
  return texts;
}

/// Runs `work` on this rank; every rank learns whether it went well everywhere, and all throw CheckpointError
/// if not. Returns what the ranks' works returned. Collective.
std::vector<std::string> together(Communicator& ranks, const std::function<std::string()>& work) {
  std::string outcome;
  try {
    outcome = "+" + work();
  } catch (const Error& error) {
    outcome = "-" + error.message();
  } catch (const std::exception& error) {
    outcome = std::string("-") + error.what();
  }
  std::vector<std::string> outcomes = exchange_texts(ranks, outcome);
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    if (outcomes[r][0] == '+') continue;
    const std::string who = ranks.size() == 1 ? "" : "rank " + std::to_string(r) + ": ";
    throw CheckpointError(who + outcomes[r].substr(1));
  }
  for (std::string& text : outcomes) text.erase(0, 1);
  return outcomes;
}

}  // namespace

/// Where this rank keeps elements of a section of a flat buffer, and from which of them on.
Engine::Impl::Kept Engine::Impl::kept_section(UnitState& unit, const checkpoint::SectionRecord& section) {
  FlatState& flat = section.frozen ? unit.frozen : unit.trainable;
  if (section.frozen) {
    const ElementRange range =
        whole_parameters() ? ElementRange{0, flat.layout.padded_elements()} : flat.layout.shard_range(rank);
    return {flat.parameters.data(), section.dtype, range};
  }
  const ElementRange range = optimizer_range(flat);
  if (section.kind == "weight") {
    if (range.empty()) return {nullptr, DataType::float32, range};
    return {master_view(flat, range.begin, range.size()).data, DataType::float32, range};
  }
  const auto state = static_cast<std::size_t>(find_state(section.kind));
  return {flat.state[state].data(), state_tensors[state].dtype, range};
}

checkpoint::Layout Engine::Impl::checkpoint_layout() const {
  std::vector<checkpoint::UnitDescription> described;
  for (const UnitState& unit : units) {
    checkpoint::UnitDescription description{unit.name, unit.uses_per_pass, {}};
    for (const int index : unit.tensors) {
      const TensorState& tensor = tensors[static_cast<std::size_t>(index)];
      description.tensors.push_back({tensor.name, tensor.shape, tensor.frozen, {}});
    }
    described.push_back(std::move(description));
  }
  std::vector<checkpoint::StateDescription> states;
  for (const OptimizerStateTensor& state : state_tensors) states.push_back({state.name, state.dtype});
  return checkpoint::make_layout(described, states, DataType::float32, config.precision.compute, ranks);
}

std::string Engine::Impl::save(const std::string& directory, const SaveOptions& options) {
  require(!in_step && !in_micro_batch && !in_evaluation,
          "save() inside a step or an evaluation; save between step() and the next micro-batch");
  set_phase("save");
  const checkpoint::LocalStorage local;
  std::int64_t token = 0;
  if (rank == 0) {
    std::random_device draw;
    token = static_cast<std::int64_t>(draw()) << 31 ^ static_cast<std::int64_t>(draw());
  }
  shard.broadcast(&token, 1, DataType::int64, 0, {}, save_label).wait();
  const std::string what = "cannot save step " + std::to_string(steps_done) + " to " + directory + ": ";
  checkpoint::RunFolder folder(local, directory, static_cast<std::uint64_t>(token));
  checkpoint::Manifest manifest;
  std::vector<std::string> records;
  try {
    records = together(shard, [&] {
      manifest.layout = checkpoint_layout();
      const checkpoint::ShardPlan plan(manifest.layout, rank, steps_done);
      if (rank == 0) folder.prepare(steps_done, plan.file_bytes() * ranks);
      const AlignedBuffer image(runtime.memory(Tier::host), plan.file_bytes(), Category::other,
                                "checkpoint snapshot");
      for (const checkpoint::SectionPiece& piece : plan.pieces()) {
        if (piece.range.empty()) continue;
        const auto& section = manifest.layout.sections[static_cast<std::size_t>(piece.section)];
        const Kept kept = kept_section(units[static_cast<std::size_t>(piece.unit)], section);
        runtime.device().copy_to_host(
            compute,
            static_cast<std::byte*>(image.data()) + plan.offset_of(piece.section, piece.unit, piece.range),
            static_cast<const std::byte*>(kept.data) +
                (piece.range.begin - kept.range.begin) * size_of(kept.dtype),
            piece.range.size() * size_of(kept.dtype));
      }
      compute.synchronize();
      checkpoint::ShardWriter writer(local, plan, folder.temporary(steps_done));
      writer.write_image({static_cast<std::byte*>(image.data()), static_cast<std::size_t>(image.bytes())});
      return checkpoint::to_text(writer.finish());
    });
  } catch (const CheckpointError& error) {
    if (rank == 0) folder.discard(steps_done);
    set_phase("idle");
    throw CheckpointError(what + error.message());
  }
  std::string path;
  try {
    path = together(shard, [&]() -> std::string {
      if (rank != 0) return {};
      for (std::size_t r = 0; r < records.size(); ++r) {
        manifest.shards.push_back(
            checkpoint::shard_record_from_text(records[r], "record of rank " + std::to_string(r)));
      }
      const LossScalerState& scale = scaler.state();
      manifest.stage = stage;
      manifest.numerics = runtime.numerics_fingerprint();
      manifest.reduction_group = reduction_group;
      manifest.run.step = steps_done;
      manifest.run.applied = applied_steps;
      manifest.run.samples = options.samples >= 0 ? options.samples : steps_done * config.train_batch_size;
      manifest.run.tokens = manifest.run.samples * model.tokens_per_sample;
      manifest.run.random = ordered_json{{"seed", config.seed}}.dump();
      manifest.run.loss_scaler = ordered_json{
          {"scale", scale.scale},
          {"clean_steps", scale.clean_steps},
          {"hysteresis_left",
           scale.hysteresis_left}}.dump();
      manifest.run.optimizer = optimizer->describe();
      manifest.run.config = config.to_json();
      manifest.run.user = options.user;
      const std::string committed = folder.commit(manifest);
      (void)folder.retain({options.keep_last, options.keep_every});
      return committed;
    })[0];
  } catch (const CheckpointError& error) {
    if (rank == 0) folder.discard(steps_done);
    set_phase("idle");
    throw CheckpointError(what + error.message());
  }
  set_phase("idle");
  return path;
}

void Engine::Impl::read_flat(checkpoint::Reader& reader, UnitState& unit, bool frozen,
                             const checkpoint::SectionRecord& section) {
  FlatState& flat = frozen ? unit.frozen : unit.trainable;
  const Kept kept = kept_section(unit, section);
  if (kept.range.empty() || flat.layout.padded_elements() == 0) return;
  const std::int64_t width = size_of(kept.dtype);
  const AlignedBuffer staged(runtime.memory(Tier::host), kept.range.size() * width, Category::other,
                             unit.name + " " + section.kind + " from checkpoint");
  auto* host = static_cast<std::byte*>(staged.data());
  std::memset(host, 0, static_cast<std::size_t>(kept.range.size() * width));  // padding
  std::vector<checkpoint::ReadRequest> requests;
  for (const TensorPiece& piece : flat.layout.pieces(kept.range)) {
    const TensorState& tensor =
        tensors[static_cast<std::size_t>(flat.tensors[static_cast<std::size_t>(piece.tensor)])];
    requests.push_back(reader.request_for(
        tensor.name, section.kind, {piece.tensor_begin, piece.tensor_begin + piece.elements}, kept.dtype,
        host + (piece.buffer_begin - kept.range.begin) * width));
  }
  reader.read(requests);
  runtime.device().copy_from_host(compute, kept.data, host, kept.range.size() * width);
  compute.synchronize();
}

LoadResult Engine::Impl::load(const std::string& path, const LoadOptions& options) {
  require(!in_step && !in_micro_batch && !in_evaluation,
          "load() inside a step or an evaluation; load before the first micro-batch of a step");
  set_phase("load");
  const checkpoint::LocalStorage local;
  LoadResult result;
  // One rank looks, so that all read the same checkpoint also while others are being saved.
  const std::string chosen = together(shard, [&]() -> std::string {
    if (rank != 0) return {};
    const checkpoint::Storage storage = local;
    if (storage.files.exists(join_path(path, std::string(checkpoint::manifest_name)))) return path;
    return checkpoint::newest_checkpoint(storage.files, path, result.notes).path;
  })[0];
  result.folder = chosen;
  const checkpoint::Layout own = checkpoint_layout();
  // Nothing of this rank changes before every rank has found all that it needs.
  std::unique_ptr<checkpoint::Reader> reader;
  LossScalerState scale = scaler.state();
  const std::vector<std::string> checked = together(shard, [&]() -> std::string {
    reader = std::make_unique<checkpoint::Reader>(local, chosen);
    for (const TensorState& tensor : tensors) {
      const checkpoint::StoredTensor& stored = reader->tensor(tensor.name);
      if (!(stored.shape == tensor.shape)) {
        throw CheckpointError("tensor " + tensor.name + " has shape " + stored.shape.to_string() + " in " +
                              chosen + ", but " + tensor.shape.to_string() + " in this model");
      }
      if (tensor.frozen || options.weights_only) continue;
      const std::vector<std::string> kinds = reader->kinds(stored);
      for (const OptimizerStateTensor& state : state_tensors) {
        if (std::find(kinds.begin(), kinds.end(), state.name) != kinds.end()) continue;
        throw CheckpointError("optimizer " + optimizer->name() + " needs " + state.name + " of tensor " +
                              tensor.name + ", which " + chosen + " does not hold (saved by " +
                              reader->manifest().run.optimizer + "); load only the weights to start it anew");
      }
    }
    for (const checkpoint::StoredTensor& stored : reader->tensors()) {
      if (tensor_index.find(stored.name) == tensor_index.end()) {
        throw CheckpointError(chosen + " holds tensor " + stored.name + ", which this model does not have");
      }
    }
    const auto saved = nlohmann::json::parse(reader->manifest().run.loss_scaler, nullptr, false);
    if (saved.is_object() && saved.contains("scale") && saved.contains("clean_steps") &&
        saved.contains("hysteresis_left")) {
      scale = {saved["scale"], saved["clean_steps"], saved["hysteresis_left"]};
    }
    return {};
  });
  // From here on weights change: a failure leaves an engine whose state is no run's.
  (void)together(shard, [&]() -> std::string {
    for (UnitState& unit : units) {
      for (FlatState* flat : {&unit.trainable, &unit.frozen}) compute.wait(flat->filled);
      for (const checkpoint::SectionRecord& section : own.sections) {
        if (options.weights_only && section.kind != "weight") continue;
        read_flat(*reader, unit, section.frozen, section);
      }
    }
    return {};
  });
  for (UnitState& unit : units) publish_weights(unit);
  const checkpoint::Manifest& manifest = reader->manifest();
  result.step = manifest.run.step;
  result.applied_steps = manifest.run.applied;
  result.samples = manifest.run.samples;
  result.world = manifest.layout.world;
  result.stage = manifest.stage;
  result.user = manifest.run.user;
  result.bytes_read = reader->statistics().bytes_read;
  if (!options.weights_only) {
    steps_done = manifest.run.step;
    applied_steps = manifest.run.applied;
    if (config.loss_scaling) scaler.restore(scale);
    if (result.world == ranks && config.reduction_group == 0) {
      reduction_group = manifest.reduction_group;
    }
    if (result.world != ranks) {
      result.notes.push_back("saved by " + std::to_string(result.world) + " ranks, loaded by " +
                             std::to_string(ranks) +
                             ": state is equal to the bit, sums over ranks round differently from here on");
    } else if (reduction_group != manifest.reduction_group) {
      result.notes.push_back("tranche.reduction_group is " + std::to_string(reduction_group) + ", was " +
                             std::to_string(manifest.reduction_group) +
                             ": sums over ranks round differently");
    }
    if (manifest.numerics != runtime.numerics_fingerprint()) {
      result.notes.push_back("numerics_fingerprint was '" + manifest.numerics + "', is '" +
                             runtime.numerics_fingerprint() + "': bits may differ from here on");
    }
  }
  set_phase("idle");
  return result;
}

void Engine::Impl::publish_weights(UnitState& unit) {
  FlatState& flat = unit.trainable;
  const DataType compute_dtype = config.precision.compute;
  if (flat.layout.padded_elements() > 0 && compute_dtype != DataType::float32) {
    for (const TensorPiece& piece : flat.layout.pieces(optimizer_range(flat))) {
      void* weights = at(flat, flat.parameters, whole_parameters(), piece.buffer_begin, compute_dtype);
      kernels::cast(compute, master_view(flat, piece.buffer_begin, piece.elements),
                    {weights, compute_dtype, Shape{piece.elements}});
    }
  }
  unit.shard_ready = compute.record();
  if (flat.layout.padded_elements() > 0 && ranks > 1 && whole_parameters() && !whole_optimizer()) {
    const std::vector<Event> ready{unit.shard_ready};
    flat.filled = all_gather_shard(flat, flat.parameters.data(), compute_dtype, ready, unit.name, "load");
  }
}

std::string Engine::save(const std::string& directory, const SaveOptions& options) {
  return impl_->guarded([&] { return impl_->save(directory, options); });
}

LoadResult Engine::load(const std::string& path, const LoadOptions& options) {
  return impl_->guarded([&] { return impl_->load(path, options); });
}

}  // namespace tranche
