#pragma once
/// Messages between ranks that are threads of one process. Private to comm/.

#include <memory>

#include "comm/transport/thread_hub.h"

namespace tranche::comm {

/// The transport of `rank`; `thread` is woken when one of its messages has been matched, or a rank failed.
std::unique_ptr<Transport> make_thread_transport(std::shared_ptr<ThreadHub> hub, int rank,
                                                 CommunicationThread& thread);

}  // namespace tranche::comm
