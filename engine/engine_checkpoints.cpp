// Saving and loading: what a checkpoint says of the run, and what a run takes from one.

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/companions.h"
#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "core/json.h"
#include "engine/adapter_base.h"
#include "engine/engine_impl.h"
#include "engine/initial_weights.h"
#include "engine/rank_texts.h"
#include "engine/state_reader.h"
#include "engine/tensor_match.h"
#include "offload/block_io.h"

namespace tranche {

using namespace detail;

using nlohmann::ordered_json;

namespace {

constexpr OperationLabel load_label{"checkpoint", "load", Traffic::control, Tier::host};

/// The parts of a fingerprint, which "; " divides, that another has not; all of it where that tells nothing.
std::string parts_not_in(const std::string& fingerprint, const std::string& other) {
  const std::string divider = "; ", whole = divider + other + divider;
  std::string parts;
  for (std::size_t at = 0; at <= fingerprint.size();) {
    const std::size_t end = std::min(fingerprint.find(divider, at), fingerprint.size());
    const std::string part = fingerprint.substr(at, end - at);
    if (whole.find(divider + part + divider) == std::string::npos) {
      parts += (parts.empty() ? "" : divider) + part;
    }
    at = end + divider.size();
  }
  return parts.empty() ? fingerprint : parts;
}

/// So that a run which starts in another folder finds it.
std::string absolute_path(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::path whole = std::filesystem::absolute(path, ignored).lexically_normal();
  return ignored ? path : whole.string();
}

/// Collective. `path`, or the newest checkpoint in it that is not among `damaged`. One rank looks, so that
/// all read the same also while others are being saved.
std::string choose_checkpoint(Communicator& ranks, FileSystem& files, const std::string& path,
                              std::vector<std::string>& notes, const std::vector<std::string>& damaged = {}) {
  return together(ranks, load_label, [&]() -> std::string {
    if (ranks.rank() != 0) return {};
    if (files.exists(join_path(path, std::string(checkpoint::manifest_name)))) return path;
    return checkpoint::newest_checkpoint(files, path, notes, damaged).path;
  })[0];
}

}  // namespace

// --- Saving ---------------------------------------------------------------------------------------------

void Engine::Impl::describe_run(checkpoint::Manifest& manifest, const SaveOptions& options) const {
  const LossScalerState& scale = scaler.state();
  manifest.stage = config.stage;
  manifest.numerics = runtime.numerics_fingerprint();
  manifest.reduction_group = std::max(reducer.reduction_group(), 1);
  manifest.run.applied = applied_steps;
  manifest.run.skipped = skipped_at_end;
  manifest.run.in_doubt = in_doubt;
  manifest.run.samples = samples_done;
  manifest.run.tokens = tokens_done;
  manifest.run.random = ordered_json{{"seed", config.seed}}.dump();
  if (config.loss_scaling) {
    manifest.run.loss_scaler = ordered_json{
        {"scale", scale.scale},
        {"clean_steps", scale.clean_steps},
        {"hysteresis_left",
         scale.hysteresis_left}}.dump();
  }
  manifest.run.schedule = rule_to_save();
  manifest.run.optimizer = optimizer->describe();
  manifest.run.config = config.to_json();
  manifest.run.user = options.user;
  if (config.lora.leaves_base_out()) {
    manifest.base = checkpoint::BaseRecord{base_folder, std::string(name_of(config.precision.compute)),
                                           base_digest ? to_text(*base_digest) : "", std::nullopt};
    if (base_folder.empty()) manifest.base->seed = static_cast<std::int64_t>(base_seed);
  }
}

std::string Engine::Impl::save(const std::string& directory, const SaveOptions& options) {
  require(state == State::idle,
          "save() inside a step or an evaluation; save between step() and the next micro-batch");
  require_whole_state("save()");
  set_phase("save");
  if (config.lora.leaves_base_out()) (void)digest_of_base();
  try {
    std::string path =
        session->save(directory, options, steps_done, proven,
                      [&](checkpoint::Manifest& manifest) { describe_run(manifest, options); });
    set_phase("idle");
    return path;
  } catch (...) {
    set_phase("idle");
    throw;
  }
}

std::string Engine::Impl::finish_saving() {
  require(!in_pass() && !in_evaluation(), "finish_saving() inside a micro-batch or an evaluation");
  return session->finish();
}

std::string Engine::save(const std::string& directory, const SaveOptions& options) {
  return impl_->guarded([&] { return impl_->save(directory, options); });
}

std::string Engine::finish_saving() {
  return impl_->guarded([&] { return impl_->finish_saving(); });
}

bool Engine::saving() const {
  return impl_->session->in_progress();
}

void Engine::request_stop() noexcept {
  impl_->stop_wanted.store(true, std::memory_order_relaxed);
}

// --- Loading --------------------------------------------------------------------------------------------

void Engine::Impl::load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets) {
  (void)finish_saving();
  const std::unique_ptr<BlockIo> io = make_block_io();
  const checkpoint::Storage storage{runtime.files(), *io, runtime.memory(Tier::host)};
  std::vector<std::string> notes;
  const std::string chosen = choose_checkpoint(world, storage.files, path, notes);
  (void)together(world, load_label, [&]() -> std::string {
    checkpoint::Reader reader(storage, chosen);
    for (const ArrayTarget& target : targets) {
      const checkpoint::ArrayRecord& array = reader.array(target.name);
      const std::string what = "array '" + array.name + "' of " + chosen;
      if (array.dtype != target.values.dtype) {
        throw CheckpointError(what + " is " + std::string(name_of(array.dtype)) + ", asked for as " +
                              std::string(name_of(target.values.dtype)));
      }
      if (const int world = reader.layout().world; array.per_rank && world != ranks) {
        throw CheckpointError(what + " is one of each rank, saved by " + std::to_string(world) +
                              ": it cannot be given to " + std::to_string(ranks) +
                              "; save an array of all ranks, whole or in parts, to load it on any number");
      }
      const std::int64_t count = target.values.elements(), has = array.shape(rank).elements();
      if (target.first < 0 || target.first + count > has) {
        throw CheckpointError(what + " has " + std::to_string(has) + " elements, asked for are " +
                              std::to_string(count) + " from " + std::to_string(target.first) + " on");
      }
    }
    if (simulated()) return {};
    for (const ArrayTarget& target : targets) {
      reader.read_array(reader.array(target.name), rank,
                        {target.first, target.first + target.values.elements()}, target.values.data);
    }
    return {};
  });
}

Engine::Impl::Part Engine::Impl::part_of(const checkpoint::Reader& reader, const LoadOptions& options) const {
  if (reader.manifest().base) {
    if (!config.lora.any()) {
      throw CheckpointError(reader.folder() +
                            " holds adapters alone: give its tranche.lora, or export it merged");
    }
    return Part::adapters;
  }
  const auto has = [&](const TensorState& tensor) {
    return !tensor.frozen && reader.find(tensor.name) != nullptr;
  };
  if (!config.lora.any() || std::any_of(store.tensors().begin(), store.tensors().end(), has))
    return Part::whole;
  if (options.weights_only) return Part::base;
  throw CheckpointError(reader.folder() +
                        " holds no adapters: take its weights as their base (--resume-weights-only)");
}

TensorMatch Engine::Impl::match_base(const checkpoint::Reader& base) const {
  return match_tensors(store, base, {.weights_only = true}, optimizer->name(), TensorsTaken::frozen);
}

std::unique_ptr<checkpoint::Reader> Engine::Impl::open_base(const checkpoint::Reader& adapters,
                                                            const LoadOptions& options,
                                                            const checkpoint::Storage& storage) {
  const std::string& recorded = adapters.manifest().base->folder;
  const std::string& path = options.base.empty() ? recorded : options.base;
  if (path.empty()) return nullptr;  // it was drawn
  try {
    std::vector<std::string> notes;
    const std::string chosen = choose_checkpoint(world, storage.files, path, notes);
    std::unique_ptr<checkpoint::Reader> base;
    (void)together(world, load_label, [&]() -> std::string {
      base = std::make_unique<checkpoint::Reader>(storage, chosen);
      if (base->manifest().base) throw CheckpointError(chosen + " holds adapters alone; export it merged");
      (void)match_base(*base);
      return {};
    });
    return base;
  } catch (const CheckpointError& problem) {
    throw CheckpointError("the base of the adapters in " + adapters.folder() + ": " + problem.message() +
                          (options.base.empty() ? "; where it lies elsewhere now, give --base" : ""));
  }
}

std::string Engine::Impl::digest_of_base() {
  if (simulated()) return {};
  if (!base_digest) base_digest = access().digest(TensorAccess::Digested::frozen_weights);
  return to_text(*base_digest);
}

void Engine::Impl::draw_base(std::uint64_t seed) {
  if (base_folder.empty() && base_seed == seed) return;
  draw_frozen_weights(store, config, seed, runtime.device(), runtime.memory(Tier::host),
                      {workspace_buffer.data(), workspace_buffer.bytes()});
  base_folder.clear();
  base_seed = seed;
}

void Engine::Impl::require_base(const checkpoint::Manifest& adapters, const std::string& chosen,
                                checkpoint::Reader* base, std::vector<std::string>& notes) {
  const checkpoint::BaseRecord& wanted = *adapters.base;
  if (simulated()) return;
  if (wanted.digest.empty()) {
    notes.push_back(chosen +
                    " does not say which values the base of its adapters had: they were not compared");
    return;
  }
  std::string found;
  if (wanted.dtype == name_of(config.precision.compute)) {
    found = digest_of_base();
  } else {
    // The base was rounded to another dtype when the digest was taken.
    const DataType dtype = parse_data_type(wanted.dtype);
    const std::vector<std::string> shares = together(world, load_label, [&] {
      const AdapterBase values = base != nullptr ? AdapterBase(model, *base) : AdapterBase(model, base_seed);
      const kernels::Digest share = values.digest(dtype, rank, ranks);
      return std::string(reinterpret_cast<const char*>(&share), sizeof(share));
    });
    kernels::Digest sum;
    for (const std::string& text : shares) {
      kernels::Digest share;
      std::memcpy(&share, text.data(), sizeof(share));
      sum += share;
    }
    found = to_text(sum);
  }
  if (wanted.digest == found) return;
  const std::string has = base_folder.empty() ? "that was drawn here" : base_folder;
  throw CheckpointError(
      chosen + " holds adapters that were trained beside another base: its digest was " + wanted.digest +
      (wanted.folder.empty() ? " (drawn, not loaded: the seed tells which; tranche.lora.save_base saves it)"
                             : " (" + wanted.folder + ")") +
      ", the base " + has + " has " + found + "; give the base that it belongs to (--base)");
}

void Engine::Impl::note_order_of_sums(const checkpoint::Manifest& manifest, LoadResult& result) {
  const auto saved = parse_json(manifest.run.config);
  const auto was = [&](const char* path, const ordered_json& value) {
    const ordered_json::json_pointer place(path);
    return saved.is_object() && saved.contains(place) && saved[place] == value;
  };
  const bool was_invariant = was("/tranche/world_size_invariant", true);
  if (config.world_size_invariant) {
    if (was_invariant && was("/train_batch_size", config.train_batch_size) &&
        was("/train_micro_batch_size_per_gpu", config.micro_batch_size)) {
      return;
    }
    result.notes.emplace_back(
        "saved by a run without tranche.world_size_invariant, or with another train_batch_size or "
        "train_micro_batch_size_per_gpu: from here on the bits are those of every number of ranks, but not "
        "what "
        "that run would have gone on to");
    return;
  }
  if (was_invariant) {
    result.notes.emplace_back(
        "saved by a run with tranche.world_size_invariant, which this one is without: sums over ranks round "
        "differently from here on");
    return;
  }
  const int saved_tensor_ranks = std::max(1, manifest.layout.axis(MeshAxis::tensor));
  const int saved_data_ranks =
      result.world / std::max(1, manifest.layout.axis(MeshAxis::pipeline)) / saved_tensor_ranks;
  const bool cut = saved_tensor_ranks > 1 || tensor != nullptr;
  if (saved_data_ranks == data_ranks && replicas == nullptr && config.reduction_group == 0) {
    // Copies of a model add gradients up as one that is sharded over all ranks does with the same groups.
    reducer.set_reduction_group(manifest.reduction_group);
  }
  if (result.world != ranks) {
    const std::string on =
        replicas == nullptr && pipeline == nullptr && tensor == nullptr ? "" : " (" + runtime.mesh().to_string() + ")";
    result.notes.push_back(
        "saved by " + manifest.layout.saved_by() + ", loaded by " + std::to_string(ranks) + on +
        ": state is equal to the bit" +
        (saved_data_ranks == data_ranks && !cut
             ? "; the bits from here on are those of a run that adds the gradients of tied "
               "tensors by use (tranche.tie_sum), as a pipeline does"
             : ", sums over ranks round differently from here on"));
  } else if (reducer.reduction_group() != manifest.reduction_group) {
    result.notes.push_back("tranche.reduction_group is " + std::to_string(reducer.reduction_group()) +
                           ", was " + std::to_string(manifest.reduction_group) +
                           ": sums over ranks round differently");
  }
}

LoadResult Engine::Impl::load(const std::string& path, const LoadOptions& options) {
  require(state == State::idle,
          "load() inside a step or an evaluation; load before the first micro-batch of a step");
  (void)finish_saving();
  set_phase("load");
  const std::unique_ptr<BlockIo> io = make_block_io();
  const checkpoint::Storage storage{runtime.files(), *io, runtime.memory(Tier::host)};
  LoadResult result;
  std::string chosen;
  const checkpoint::Layout own = session->whole_layout();
  // Nothing of this rank changes before every rank has found all that it needs.
  std::unique_ptr<checkpoint::Reader> reader, base;
  checkpoint::Companions companions;
  Part part = Part::whole;
  TensorMatch match;
  LossScalerState scale = scaler.state();
  const auto find_all = [&]() -> std::string {
    reader = std::make_unique<checkpoint::Reader>(storage, chosen);
    part = part_of(*reader, options);
    match = match_tensors(store, *reader, options, optimizer->name(),
                          part == Part::whole  ? TensorsTaken::all
                          : part == Part::base ? TensorsTaken::frozen
                                               : TensorsTaken::trainable);
    const auto saved = parse_json(reader->manifest().run.loss_scaler);
    const auto has_number = [&](const char* key) { return saved.contains(key) && saved[key].is_number(); };
    if (config.loss_scaling && has_number("scale") && has_number("clean_steps") &&
        has_number("hysteresis_left")) {
      scale = {saved["scale"], saved["clean_steps"], saved["hysteresis_left"]};
    }
    return {};
  };
  const auto read_all = [&]() -> std::string {
    if (simulated()) return {};  // there is no memory to read to
    std::vector<checkpoint::SectionRecord> sections = own.sections;
    if (options.weights_only) std::erase_if(sections, [](const auto& one) { return one.kind != "weight"; });
    const auto read = [&](checkpoint::Reader& from, Part of, const TensorMatch& tensors) {
      std::vector<checkpoint::SectionRecord> of_part = sections;
      if (of != Part::whole)
        std::erase_if(of_part, [&](const auto& one) { return one.frozen != (of == Part::base); });
      read_sections(store, from, tensors, of_part, runtime.device(), runtime.memory(Tier::host));
    };
    if (base) read(*base, Part::base, match_base(*base));
    read(*reader, part, match);
    if (rank == 0) {
      companions = checkpoint::read_companions(storage.files, reader->folder(), reader->manifest());
      if (companions.empty() && base)
        companions = checkpoint::read_companions(storage.files, base->folder(), base->manifest());
    }
    return {};
  };
  std::vector<std::string> damaged, passed_over;
  for (bool whole = false; !whole;) {
    result.notes = passed_over;
    chosen = choose_checkpoint(world, storage.files, path, result.notes, damaged);
    (void)together(world, load_label, find_all);
    base.reset();
    if (part == Part::adapters) base = open_base(*reader, options, storage);
    // From here on weights change: a failure leaves an engine whose state is no run's.
    half_loaded = chosen;
    try {
      (void)together(world, load_label, read_all);
      whole = true;
    } catch (const CheckpointError& damage) {
      if (!options.pass_over_damaged || chosen == path) throw;
      damaged.push_back(chosen);
      passed_over.push_back("passed over: " + damage.message());
    }
  }
  result.folder = chosen;
  result.differences = match.differences;
  for (FlatBuffer* flat : store.trainable()) store.publish(*flat, "load");
  const checkpoint::Manifest& manifest = reader->manifest();
  base_digest.reset();
  session->forget_last_save();
  proven = false;
  if (part != Part::adapters) {
    base_folder = absolute_path(chosen);
    if (!options.base.empty())
      result.notes.push_back("the base " + options.base + " is not read: " + chosen + " is whole without it");
  }
  if (base) base_folder = absolute_path(base->folder());
  if (part == Part::adapters) {
    if (!base) draw_base(seed_of_base(manifest, chosen));
    require_base(manifest, chosen, base.get(), result.notes);
  }
  half_loaded.clear();
  for (const checkpoint::Companion& companion : companions) result.companions.push_back(companion.name);
  session->carry(std::move(companions));
  if (manifest.run.in_doubt && chosen == path) {
    result.notes.push_back("the weights of " + chosen +
                           " may be ruined: the last loss or gradient that they gave was not finite");
  }
  result.step = manifest.run.step;
  result.applied_steps = manifest.run.applied;
  result.samples = manifest.run.samples;
  result.tokens = manifest.run.tokens;
  result.config = manifest.run.config;
  result.optimizer = manifest.run.optimizer;
  result.world = manifest.layout.world;
  result.stage = manifest.stage;
  result.user = manifest.run.user;
  std::string of_ranks;
  for (const checkpoint::ArrayRecord& array : manifest.layout.arrays) {
    const bool there = !array.per_rank || rank < result.world;
    result.arrays.push_back({array.name, array.dtype, array.per_rank, there ? array.shape(rank) : Shape{0}});
    if (array.per_rank) of_ranks += (of_ranks.empty() ? "" : ", ") + array.name;
  }
  if (!of_ranks.empty() && result.world != ranks) {
    result.notes.push_back("arrays of each rank (" + of_ranks + ") were saved by " +
                           std::to_string(result.world) + " and cannot be given to " + std::to_string(ranks));
  }
  result.bytes_read = reader->statistics().bytes_read;
  if (!options.weights_only) {
    session->goes_on_from(manifest);
    noise_averages = {};  // of the run that this engine leaves
    steps_done = manifest.run.step;
    applied_steps = manifest.run.applied;
    skipped_at_end = manifest.run.skipped;
    in_doubt = manifest.run.in_doubt;
    samples_done = manifest.run.samples;
    tokens_done = manifest.run.tokens;
    take_saved_rule(manifest.run.schedule, result.notes);
    if (config.loss_scaling) {
      scaler.restore(scale);
      if (manifest.run.loss_scaler == "{}") {
        result.notes.push_back("saved without loss scaling: it begins with a scale of " +
                               std::to_string(static_cast<std::int64_t>(scale.scale)));
      }
    }
    note_order_of_sums(manifest, result);
    // Nobody chose these, so that a program which compares no configurations would not know.
    const EarlierDefaults earlier = earlier_defaults(config, manifest.run.config);
    if (earlier.bf16) {
      result.notes.emplace_back(
          "bf16.enabled: not given, which is fp32; the run was saved in bf16: write it to choose");
    }
    if (earlier.clipping) {
      result.notes.emplace_back(
          "gradient_clipping: not given, which is off; the run was saved with 1.0: write it to choose");
    }
    // States that this optimizer has were required; what else was saved ends here.
    std::set<std::string> dropped;
    for (std::size_t t = 0; t < match.stored.size(); ++t) {
      if (store.tensors()[t].frozen || match.stored[t] == nullptr) continue;
      for (const std::string& kind : reader->kinds(*match.stored[t])) {
        const std::vector<OptimizerStateTensor>& states = store.buffer_of(store.tensors()[t]).states;
        const bool used =
            kind == "weight" ||
            std::any_of(states.begin(), states.end(), [&](const auto& state) { return state.name == kind; });
        if (!used) dropped.insert(kind);
      }
    }
    if (!dropped.empty()) {
      const auto described = parse_json(result.optimizer);
      const bool named = described.contains("type") && described["type"].is_string();
      const std::string saved_by = named ? described["type"].get<std::string>() : "another";
      std::string names;
      for (const std::string& kind : dropped) names += (names.empty() ? "" : ", ") + kind;
      result.notes.push_back("optimizer " + optimizer->name() + " has no use for " + names + " of " + chosen +
                             " (saved by " + saved_by + "): dropped, and not in later checkpoints");
    }
    const std::string numerics = runtime.numerics_fingerprint();
    const std::string before = parts_not_in(manifest.numerics, numerics);
    const bool of_threads = before.ends_with(" threads a rank") && before.find("; ") == std::string::npos &&
                            !threads_change_bits();
    if (manifest.numerics != numerics && !(of_threads && config.world_size_invariant)) {
      result.notes.push_back("in the numerics fingerprint '" + before + "' is '" +
                             parts_not_in(numerics, manifest.numerics) +
                             "' now: bits may differ from here on");
    }
  }
  set_phase("idle");
  return result;
}

void Engine::Impl::require_whole_state(const char* call) const {
  require(half_loaded.empty(), std::string(call) + " after the load of " + half_loaded +
                                   " failed half-way: some weights are new, some are not; load another "
                                   "checkpoint, or make a new engine");
}

void Engine::load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets) {
  impl_->guarded([&] { impl_->load_arrays(path, targets); });
}

LoadResult Engine::load(const std::string& path, const LoadOptions& options) {
  return impl_->guarded([&] { return impl_->load(path, options); });
}

}  // namespace tranche
