#include "engine/checkpoint_loader.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/folder.h"
#include "core/json.h"
#include "engine/adapter_base.h"
#include "engine/rank_texts.h"
#include "engine/state_reader.h"
#include "offload/block_io.h"
#include "tranche/core/error.h"

namespace tranche::detail {

namespace {

constexpr OperationLabel load_label{"checkpoint", "load", Traffic::control, Tier::host};

/// Collective. Returns `path`, or the newest checkpoint in it that is not among `damaged`. Only one rank
/// searches, so that all ranks load the same one even while others are being saved.
std::string choose_checkpoint(Communicator& ranks, FileSystem& files, const std::string& path,
                              std::vector<std::string>& notes, const std::vector<std::string>& damaged = {}) {
  return together(ranks, load_label, [&]() -> std::string {
    if (ranks.rank() != 0) return {};
    if (files.exists(join_path(path, std::string(checkpoint::manifest_name)))) return path;
    return checkpoint::newest_checkpoint(files, path, notes, damaged).path;
  })[0];
}

std::string listed(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

CheckpointLoader::CheckpointLoader(const Runtime& runtime, const Config& config, StateStore& store,
                                   std::string optimizer, CheckpointSession& session, RunProgress& progress,
                                   FrozenBase& base, RunRecord& run)
    : runtime_(runtime),
      config_(config),
      store_(store),
      optimizer_(std::move(optimizer)),
      session_(session),
      progress_(progress),
      base_(base),
      run_(run) {}

void CheckpointLoader::load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets) {
  const std::unique_ptr<BlockIo> io = make_block_io();
  const checkpoint::Storage storage{runtime_.files(), *io, runtime_.memory(Tier::host)};
  std::vector<std::string> notes;
  const int rank = runtime_.rank(), ranks = runtime_.size();
  const std::string chosen = choose_checkpoint(runtime_.all(), storage.files, path, notes);
  (void)together(runtime_.all(), load_label, [&]() -> std::string {
    checkpoint::Reader reader(storage, chosen);
    for (const ArrayTarget& target : targets) {
      const checkpoint::ArrayRecord& array = reader.array(target.name);
      const std::string what = "array '" + array.name + "' of " + chosen;
      if (array.dtype != target.values.dtype) {
        throw CheckpointError(what + " is " + std::string(name_of(array.dtype)) + ", asked for as " +
                              std::string(name_of(target.values.dtype)));
      }
      if (const int saved_by = reader.layout().world; array.per_rank && saved_by != ranks) {
        throw CheckpointError(
            what + " is stored per rank, with world size " + std::to_string(saved_by) +
            ": it cannot be loaded with world size " + std::to_string(ranks) +
            "; save one array of all ranks, whole or in parts, to load it on any number of ranks");
      }
      const std::int64_t count = target.values.elements(), has = array.shape(rank).elements();
      if (target.first < 0 || target.first + count > has) {
        throw CheckpointError(what + " has " + std::to_string(has) + " elements, but the load wants " +
                              std::to_string(count) + " from element " + std::to_string(target.first) +
                              " on");
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

CheckpointLoader::Part CheckpointLoader::part_of(const checkpoint::Reader& reader,
                                                 const LoadOptions& options) const {
  if (reader.manifest().base) {
    if (!config_.lora.any()) {
      throw CheckpointError(reader.folder() +
                            " holds adapters alone: give its tranche.lora, or export it merged");
    }
    return Part::adapters;
  }
  const auto has = [&](const TensorState& tensor) {
    return !tensor.frozen && reader.find(tensor.name) != nullptr;
  };
  if (!config_.lora.any() || std::any_of(store_.tensors().begin(), store_.tensors().end(), has))
    return Part::whole;
  if (options.weights_only) return Part::base;
  throw CheckpointError(reader.folder() +
                        " holds no adapters: take its weights as their base (--resume-weights-only)");
}

TensorMatch CheckpointLoader::match_base(const checkpoint::Reader& base) const {
  return match_tensors(store_, base, {.weights_only = true}, optimizer_, TensorsTaken::frozen);
}

std::unique_ptr<checkpoint::Reader> CheckpointLoader::open_base(const checkpoint::Reader& adapters,
                                                                const LoadOptions& options,
                                                                const checkpoint::Storage& storage) {
  const std::string& recorded = adapters.manifest().base->folder;
  const std::string& path = options.base.empty() ? recorded : options.base;
  if (path.empty()) return nullptr;  // the base has no folder: its weights are drawn from the seed
  try {
    std::vector<std::string> notes;
    const std::string chosen = choose_checkpoint(runtime_.all(), storage.files, path, notes);
    std::unique_ptr<checkpoint::Reader> base;
    (void)together(runtime_.all(), load_label, [&]() -> std::string {
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

CheckpointLoader::Found CheckpointLoader::find(const std::string& path, const LoadOptions& options,
                                               const checkpoint::Storage& storage,
                                               std::vector<std::string>& notes,
                                               const std::vector<std::string>& damaged) {
  Found found;
  found.folder = choose_checkpoint(runtime_.all(), storage.files, path, notes, damaged);
  (void)together(runtime_.all(), load_label, [&]() -> std::string {
    found.reader = std::make_unique<checkpoint::Reader>(storage, found.folder);
    found.part = part_of(*found.reader, options);
    found.match = match_tensors(store_, *found.reader, options, optimizer_,
                                found.part == Part::whole  ? TensorsTaken::all
                                : found.part == Part::base ? TensorsTaken::frozen
                                                           : TensorsTaken::trainable);
    return {};
  });
  if (found.part == Part::adapters) found.base = open_base(*found.reader, options, storage);
  return found;
}

void CheckpointLoader::read(Found& found, bool weights_only) {
  if (simulated()) return;  // there is no memory to read into
  std::vector<checkpoint::SectionRecord> sections = session_.whole_layout().sections;
  if (weights_only) std::erase_if(sections, [](const auto& one) { return one.kind != "weight"; });
  const auto read_part = [&](checkpoint::Reader& from, Part part, const TensorMatch& tensors) {
    std::vector<checkpoint::SectionRecord> of_part = sections;
    if (part != Part::whole) {
      std::erase_if(of_part, [&](const auto& one) { return one.frozen != (part == Part::base); });
    }
    read_sections(store_, from, tensors, of_part, runtime_.device(), runtime_.memory(Tier::host));
  };
  if (found.base) read_part(*found.base, Part::base, match_base(*found.base));
  read_part(*found.reader, found.part, found.match);
  if (runtime_.rank() != 0) return;
  const auto companions_of = [&](const checkpoint::Reader& from) {
    return checkpoint::read_companions(runtime_.files(), from.folder(), from.manifest());
  };
  found.companions = companions_of(*found.reader);
  if (found.companions.empty() && found.base) found.companions = companions_of(*found.base);
}

CheckpointLoader::Found CheckpointLoader::find_and_read(const std::string& path, const LoadOptions& options,
                                                        const checkpoint::Storage& storage,
                                                        LoadResult& result) {
  std::vector<std::string> damaged, passed_over;
  while (true) {
    result.notes = passed_over;
    Found found = find(path, options, storage, result.notes, damaged);
    // Weights change from here on; a failure leaves the engine with a mixture of two states.
    half_loaded_ = found.folder;
    try {
      (void)together(runtime_.all(), load_label, [&]() -> std::string {
        read(found, options.weights_only);
        return {};
      });
      found.damaged = std::move(damaged);
      return found;
    } catch (const CheckpointError& damage) {
      if (!options.pass_over_damaged || found.folder == path) throw;
      damaged.push_back(found.folder);
      passed_over.push_back("passed over: " + damage.message());
    }
  }
}

void CheckpointLoader::settle_base(const Found& found, const LoadOptions& options,
                                   std::vector<std::string>& notes) {
  if (found.part != Part::adapters) {
    base_.read_from(found.folder);
    if (options.base.empty()) return;
    notes.push_back("the base " + options.base + " is not read: " + found.folder + " is whole without it");
    return;
  }
  const checkpoint::Manifest& manifest = found.reader->manifest();
  if (found.base) {
    base_.read_from(found.base->folder());
  } else {
    base_.draw(seed_of_base(manifest, found.folder));
  }
  base_.require(manifest, found.folder, found.base.get(), notes);
}

LoadResult CheckpointLoader::load(const std::string& path, const LoadOptions& options) {
  const std::unique_ptr<BlockIo> io = make_block_io();
  const checkpoint::Storage storage{runtime_.files(), *io, runtime_.memory(Tier::host)};
  LoadResult result;
  Found found = find_and_read(path, options, storage, result);
  for (FlatBuffer* flat : store_.trainable()) store_.publish(*flat, "load");
  base_.changed();
  progress_.weights_loaded();
  settle_base(found, options, result.notes);
  half_loaded_.clear();
  describe(found, path, result);
  session_.carry(std::move(found.companions));
  if (options.weights_only) return result;
  session_.goes_on_from(found.reader->manifest(), found.damaged);
  run_.go_on_from(found.reader->manifest(), result);
  note_dropped_states(found, result);
  return result;
}

void CheckpointLoader::describe(const Found& found, const std::string& path, LoadResult& result) const {
  const checkpoint::Manifest& manifest = found.reader->manifest();
  result.folder = found.folder;
  result.differences = found.match.differences;
  for (const checkpoint::Companion& companion : found.companions) result.companions.push_back(companion.name);
  if (manifest.run.in_doubt && found.folder == path) {
    result.notes.push_back("the weights of " + found.folder +
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
    const bool there = !array.per_rank || runtime_.rank() < result.world;
    result.arrays.push_back(
        {array.name, array.dtype, array.per_rank, there ? array.shape(runtime_.rank()) : Shape{0}});
    if (array.per_rank) of_ranks += (of_ranks.empty() ? "" : ", ") + array.name;
  }
  if (!of_ranks.empty() && result.world != runtime_.size()) {
    result.notes.push_back("per-rank arrays (" + of_ranks + ") were saved with world size " +
                           std::to_string(result.world) + " and cannot be loaded with world size " +
                           std::to_string(runtime_.size()));
  }
  result.bytes_read = found.reader->statistics().bytes_read;
}

void CheckpointLoader::note_dropped_states(const Found& found, LoadResult& result) const {
  std::set<std::string> dropped, of_frozen;
  std::vector<std::string> frozen;
  for (std::size_t t = 0; t < found.match.stored.size(); ++t) {
    if (found.match.stored[t] == nullptr) continue;
    std::vector<std::string> kinds = found.reader->kinds(*found.match.stored[t]);
    if (store_.tensors()[t].frozen) {
      std::erase(kinds, "weight");
      if (!kinds.empty()) frozen.push_back(store_.tensors()[t].name);
      of_frozen.insert(kinds.begin(), kinds.end());
      continue;
    }
    for (const std::string& kind : kinds) {
      const std::vector<OptimizerStateTensor>& states = store_.buffer_of(store_.tensors()[t]).states;
      const bool used = kind == "weight" || std::any_of(states.begin(), states.end(), [&](const auto& state) {
                          return state.name == kind;
                        });
      if (!used) dropped.insert(kind);
    }
  }
  if (!dropped.empty()) {
    const auto described = parse_json(result.optimizer);
    const bool named = described.contains("type") && described["type"].is_string();
    const std::string saved_by = named ? described["type"].get<std::string>() : "another";
    result.notes.push_back("optimizer " + optimizer_ + " has no use for " + listed(dropped) + " of " +
                           found.folder + " (saved by " + saved_by +
                           "): dropped, and not in later checkpoints");
  }
  if (frozen.empty()) return;
  result.notes.push_back(
      frozen.front() +
      (frozen.size() == 1 ? " is" : " and " + std::to_string(frozen.size() - 1) + " more are") +
      " frozen now: " + listed(of_frozen) + " of " + found.folder + " dropped, and not in later checkpoints");
}

void CheckpointLoader::require_whole_state(const char* call) const {
  if (half_loaded_.empty()) return;
  throw LogicError(
      std::string(call) + " after the load of " + half_loaded_ +
      " failed half-way: some weights are new, some are not; load another checkpoint, or make a new engine");
}

}  // namespace tranche::detail
