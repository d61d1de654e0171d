#pragma once
/// Options and results of Engine::save and Engine::load.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tranche/core/tensor_view.h"

namespace tranche {

/// An array of the program's own in a checkpoint: numbers of any dtype in host memory, which save() copies.
/// Every rank passes the same arrays in the same order.
struct SavedArray {
  std::string name;        ///< unique among arrays; parts between '/' must not be empty, "." or ".."
  Shape shape;             ///< the whole array's, or for of_rank() this rank's
  std::int64_t first = 0;  ///< the element of the whole array at which `values` begins
  ConstTensorView values;  ///< this rank's part
  bool partial = false;    ///< it is a part of an array of all ranks
  bool per_rank = false;   ///< it is this rank's own array

  /// An array of which all ranks have a bitwise equal copy. Each rank stores a share of it.
  static SavedArray whole(std::string name, ConstTensorView values) {
    return {std::move(name), values.shape, 0, values, false, false};
  }
  /// This rank's part of an array of all ranks. Parts follow each other in rank order, without gaps; some may
  /// be empty. Ranks may pass the same part, if it is bitwise equal: each stores a share of it.
  static SavedArray part(std::string name, Shape whole, std::int64_t first, ConstTensorView values) {
    return {std::move(name), whole, first, values, true, false};
  }
  /// An array of this rank alone; shapes may differ between ranks. It can be loaded only by as many ranks.
  static SavedArray of_rank(std::string name, ConstTensorView values) {
    return {std::move(name), values.shape, 0, values, false, true};
  }
};

/// An array that a checkpoint holds.
struct ArrayInfo {
  std::string name;
  DataType dtype = DataType::float32;
  bool per_rank = false;
  Shape shape;  ///< for an array of each rank: this rank's; [0] if there was no such rank
};

/// Host memory for elements of an array: as many as `values` has, from element `first` on, in the array's
/// dtype.
struct ArrayTarget {
  std::string name;
  TensorView values;
  std::int64_t first = 0;
};

struct SaveOptions {
  std::string user = "{}";  ///< the caller's own JSON object, at most 1 MiB; from rank 0
  /// Which checkpoints are kept: the newest so many (0: all) ... Until a later step is applied, or an
  /// evaluation of the saved weights has a finite loss, the newest earlier checkpoint that is known to be
  /// good is kept as well. Checkpoints that this engine passed over as damaged are not counted, and stay.
  int keep_last = 0;
  std::int64_t keep_every = 0;  ///< ... and those whose step is a multiple ...
  /// ... and the one with the lowest number at this JSON pointer ("/loss") of its `user`; empty: none.
  std::string keep_lowest = {};
  /// Return when the checkpoint is durable; otherwise as soon as this rank's shard is copied.
  bool wait = false;
  std::vector<SavedArray> arrays = {};
};

struct LoadOptions {
  /// Load only weights: optimizer state, step and loss scale stay unchanged.
  bool weights_only = false;
  /// For a folder of checkpoints whose newest complete one proves to be damaged: load the next older one
  /// instead, with a line in LoadResult::notes, until one is undamaged. Otherwise damage is an error.
  bool pass_over_damaged = false;
  /// Convert optimizer state and weights that were saved in another format (tranche.moments, tranche.master).
  /// Otherwise another format is an error; with weights_only weights are accepted in any format.
  bool convert_state = false;
  /// For a checkpoint that holds only adapters (LoraConfig): the path of its base, a checkpoint or a folder
  /// of them; empty: the path that it recorded.
  std::string base = {};
  /// Load the tensors that checkpoint and model both have, with their optimizer state unless weights_only.
  /// Tensors that the checkpoint lacks keep their weight and optimizer state (in a new engine the initial
  /// ones), and tensors that the model lacks are skipped; LoadResult::differences has a line for each. A
  /// different shape is still an error. Without this each difference is an error.
  bool partial = false;
  /// Pairs of a name in the checkpoint and the name in the model that replaces it; the first rule that
  /// matches applies. One `*` in the old name stands for any text, in the new one for the same text. A rule
  /// that matches nothing is an error.
  std::vector<std::pair<std::string, std::string>> renames = {};
};

/// The loaded state, and its differences from the saved one.
struct LoadResult {
  std::string folder;  ///< the checkpoint
  std::int64_t step = 0, applied_steps = 0, samples = 0, tokens = 0;
  int world = 1, stage = 0;       ///< of the run that saved
  std::string user = "{}";        ///< as passed in SaveOptions
  std::vector<ArrayInfo> arrays;  ///< the arrays that load_arrays() can read
  std::string config = "{}";      ///< the effective configuration of that run
  std::string optimizer;          ///< the text of Optimizer::describe()
  std::int64_t bytes_read = 0;    ///< by this rank
  /// On rank 0, names of the files that were saved with the weights (a tokenizer's, generation settings).
  /// This engine's later checkpoints contain them too.
  std::vector<std::string> companions;
  std::vector<std::string> differences;  ///< a line for each tensor that is renamed, missing or skipped
  /// A line for each setting of configuration and optimizer that affects results and is another one now:
  /// "optimizer.params.lr is 0.0001, was 0.001". Empty if only weights were loaded.
  std::vector<std::string> changes;
  std::vector<std::string> notes;  ///< a line for each difference that changes bits or was ignored
};

}  // namespace tranche
