#pragma once
/// `tranche checkpoint ...`, on one process without a device.

#include <cstdint>
#include <string>

#include "checkpoint/reader.h"
#include "tools/checkpoint/checkpoint_arguments.h"
#include "tools/train/run.h"

namespace tranche::tools {

/// Runs the action; errors are written to output.errors. Returns the exit status: the error's; 4 when verify
/// found damage; 1 when diff found a difference.
int run_checkpoint(const Options& options, const Output& output);

/// The actions. They throw errors, and return the status of their findings.
int checkpoint_list(const CheckpointOptions& options, const Output& output);
int checkpoint_verify(const CheckpointOptions& options, const Output& output);
int checkpoint_show(const CheckpointOptions& options, const Output& output);
int checkpoint_export(const CheckpointOptions& options, const Output& output);
int checkpoint_import(const CheckpointOptions& options, const Output& output);
int checkpoint_diff(const CheckpointOptions& options, const Output& output);

/// Calls find_checkpoint() and writes its notes to output.errors.
std::string chosen_checkpoint(detail::FileSystem& files, const std::string& path, const Output& output);
/// "2026-11-20 23:43:34", UTC.
std::string format_time(std::int64_t seconds_since_1970);
/// The last name of a path.
std::string base_name(const std::string& path);

}  // namespace tranche::tools
