#pragma once
/// The checkpoint that a run begins from.

#include <optional>
#include <string>
#include <vector>

#include "offload/file_system.h"
#include "tools/arguments.h"
#include "tools/train/run_identity.h"

namespace tranche::tools {

/// Found, and held against the run, before an engine is made.
struct ResumeSource {
  std::string folder;                  ///< the checkpoint; empty: none, weights are drawn
  bool weights_only = false;           ///< the run is a new one
  bool partial = false;                ///< tensors may be missing or too many
  std::string config;                  ///< effective configuration of the run that saved it
  std::vector<std::string> changes;    ///< a line for each property of model and data that is not as it was
  std::vector<std::string> notes;      ///< other lines for people
  std::optional<Tokenizer> tokenizer;  ///< of the run that saved it; none: not known
};

/// The checkpoint that --resume, --resume-weights-only or --from ask for. Not collective: for one rank.
///
/// `--resume latest` finds nothing in a folder without checkpoints, which a note says, so that the command
/// line that starts a run continues it after it was killed, too; but it is refused where checkpoints are
/// there and all of them damaged, and where the folder holds anything else than what a run leaves before its
/// first complete save (checkpoint::strangers_in()). `--resume best` takes the one that --keep-best keeps,
/// likewise. A run that is not a continuation of what lies in its --checkpoint-dir is refused: its
/// checkpoints would mix with, and its retention remove, another's.
///
/// Throws CheckpointError for what is not there, not complete, or of another model or tokenizer (weights
/// alone may take a new tokenizer); ConfigurationError for a --checkpoint-dir in use, and for text, or bytes
/// of tranche tokenize, where the weights are of a model with another tokenizer and --data-format does not
/// ask for it. A model of at most 260 tokens whose folder has no tokenizer counts as one of bytes and some
/// marks.
ResumeSource find_resume_source(detail::FileSystem& files, const Options& options,
                                const RunIdentity& present);

/// Tokens of the sequences that the checkpoint of `--from` or `--resume` was trained on; 0: it does not say,
/// or there is none yet. Not collective. Throws CheckpointError for what is not there or not complete.
std::int64_t sequence_of_source(detail::FileSystem& files, const Options& options);

/// Holds the user's JSON of another checkpoint against the run, instead of the one that find_resume_source()
/// found, which turned out to be damaged: fills in folder and changes. Throws as find_resume_source() does.
void hold_against(const RunIdentity& present, const models::ModelRegistry& models, const std::string& user,
                  const std::string& folder, ResumeSource& resume_source);

}  // namespace tranche::tools
