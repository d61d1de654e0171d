#pragma once
/// A pipeline's schedule as data: for each rank the list of its compute actions, messages, gathers and frees.
/// Integers only; no device, no communicator.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::pipeline {

/// The kind of an action. The letters are those of torch's schedule files (torch.distributed.pipelining,
/// `_ComputationType`).
enum class ActionKind : std::uint8_t {
  forward,           ///< F
  backward,          ///< B: input gradients and weight gradients together
  input_gradient,    ///< I: the gradient of the chunk's input only
  weight_gradient,   ///< W: the weight gradients that I leaves out
  send_residual,     ///< SEND_F: sends the chunk's output to the rank of the next chunk
  receive_residual,  ///< RECV_F: receives the chunk's input from the rank of the chunk before
  send_gradient,     ///< SEND_B: sends the gradient of the chunk's input to the rank of the chunk before
  receive_gradient,  ///< RECV_B: receives the gradient of the chunk's output from the rank of the next chunk
  gather,            ///< GATHER: gathers the chunk's weights
  free,              ///< FREE: releases the gathered weights
};
/// "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "GATHER", "FREE".
std::string_view letters_of(ActionKind kind);
/// True for F, B, I and W.
bool computes(ActionKind kind);
bool is_message(ActionKind kind);
/// True for SEND_F and SEND_B.
bool sends(ActionKind kind);
bool receives(ActionKind kind);

/// One action of one rank. A chunk is a range of consecutive units of the model. Chunks are numbered over the
/// whole model: the input of chunk c is the output of chunk c - 1.
struct Action {
  ActionKind kind = ActionKind::forward;
  int chunk = 0;
  std::int64_t micro_batch = 0;  ///< 0 for gather and free
  /// "2F0": forward of micro-batch 0 on chunk 2. "2GATHER", "2FREE": without a micro-batch.
  std::string name() const;
  friend auto operator<=>(const Action&, const Action&) = default;
};

/// The other side of a message: the receive of a send, and the send of a receive.
Action partner(const Action& message);

/// The rank of each chunk of a pipeline.
enum class ChunkPlacement : std::uint8_t {
  loop,  ///< chunk c is on rank c mod p
  v,  ///< two chunks on each rank: chunks 0 to p - 1 on ranks 0 to p - 1, chunks p to 2p - 1 on ranks p - 1
      ///< to 0
};
/// The rank of each of `stages` times `chunks_per_rank` chunks. Throws InvalidArgument for numbers below 1,
/// and for a V unless there are two chunks on a rank.
std::vector<int> ranks_of_chunks(ChunkPlacement placement, int stages, int chunks_per_rank);

struct PipelineSchedule {
  std::vector<std::vector<Action>> ranks;  ///< the actions of each rank of the pipeline, in order
  std::vector<int> rank_of_chunk;          ///< for each chunk of the whole model
  std::int64_t micro_batches = 0;
  int stages() const { return static_cast<int>(ranks.size()); }
  int chunks() const { return static_cast<int>(rank_of_chunk.size()); }
  bool several_chunks() const { return chunks() > stages(); }
  /// The action's name in charts and traces: "F0" if each rank has one chunk, otherwise "2F0".
  std::string name_of(const Action& action) const;
  bool has_next(int chunk) const { return chunk + 1 < chunks(); }
  /// True when chunk + 1 is on another rank, so that the residual and the gradient between them are messages.
  bool crosses(int chunk) const {
    return has_next(chunk) && rank_of_chunk[static_cast<std::size_t>(chunk)] !=
                                  rank_of_chunk[static_cast<std::size_t>(chunk) + 1];
  }
  friend bool operator==(const PipelineSchedule&, const PipelineSchedule&) = default;
};

}  // namespace tranche::pipeline
