#pragma once
/// The checkpoint from which a run starts.

#include <optional>
#include <string>
#include <vector>

#include "offload/file_system.h"
#include "tools/arguments.h"
#include "tools/train/run_identity.h"

namespace tranche::tools {

/// The checkpoint, found and compared with the run before an engine is made.
struct ResumeSource {
  std::string folder;                  ///< the checkpoint; empty: weights are drawn
  bool weights_only = false;           ///< the run is a new one
  bool partial = false;                ///< tensors may be missing or additional
  std::string config;                  ///< effective configuration of the run that saved it
  std::vector<std::string> changes;    ///< a line for each changed property of model and data
  std::vector<std::string> notes;      ///< other lines for people
  std::optional<Tokenizer> tokenizer;  ///< of the run that saved it; nullopt: unknown
};

/// Finds the checkpoint for --resume, --resume-weights-only or --from. Not collective: for one rank.
///
/// `--resume latest` finds nothing in a folder without checkpoints, which a note reports, so that the command
/// line that starts a run also continues it after it was killed. It throws if all checkpoints there are
/// damaged, and if the folder holds anything that a run does not create before its first complete save
/// (checkpoint::strangers_in()). `--resume best` selects the checkpoint that --keep-best keeps, in the same
/// way. A run is refused if its --checkpoint-dir belongs to a run that it does not continue: the checkpoints
/// of both would mix, and its retention would remove the other's.
///
/// Throws CheckpointError for a checkpoint that is missing, incomplete, or belongs to another model or
/// tokenizer (weights alone may get a new tokenizer); ConfigurationError for a --checkpoint-dir in use, and
/// for text, or bytes of tranche tokenize, if the weights belong to a model with another tokenizer and
/// --data-format does not request it. A model of at most 260 tokens whose folder has no tokenizer counts as
/// one of bytes and some markers.
ResumeSource find_resume_source(detail::FileSystem& files, const Options& options,
                                const RunIdentity& present);

/// A line that names the best checkpoint of a run's folder if it is another than `taken`, the newest; empty
/// if it is the same or none is recorded (--keep-best).
std::string note_on_best(const std::string& folder, const std::string& taken);

/// The folders in which the model's tokenizer may lie: what the checkpoint carries, and beside --model's
/// file.
std::vector<std::string> tokenizer_folders(const Options& options, const ResumeSource& source);

/// The sequence length with which the checkpoint of `--from` or `--resume` was trained; 0: unknown, or there
/// is none yet. Not collective. Throws CheckpointError for a missing or incomplete checkpoint.
std::int64_t sequence_of_source(detail::FileSystem& files, const Options& options);

/// Replaces the checkpoint that find_resume_source() found, after it turned out to be damaged: compares the
/// other checkpoint's user JSON with the run, and fills in folder and changes. Throws as find_resume_source()
/// does.
void hold_against(const RunIdentity& present, const models::ModelRegistry& models, const std::string& user,
                  const std::string& folder, ResumeSource& resume_source);

}  // namespace tranche::tools
