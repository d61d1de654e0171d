#pragma once
/// The exception by which a rank reports another rank's failure. Private to the library.

#include <source_location>
#include <string>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::comm {

/// The echo of another rank's failure. It has its own type so that the first cause can be found among many
/// errors. It has that failure's exit status, because a launcher returns the status of whichever rank ends
/// first.
class PeerFailure : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
  PeerFailure(std::string message, ExitStatus status,
              std::source_location where = std::source_location::current())
      : CommunicationError(std::move(message), status, where) {}
};

}  // namespace tranche::comm
