# These tests cover the model description and budgets. They are separate from the engine's own tests, which need its other sources.
set(here ${CMAKE_CURRENT_LIST_DIR})
tranche_test(test_engine_model
  SOURCES ${here}/offload_share_test.cpp ${here}/model_spec_test.cpp ${here}/runtime_test.cpp
  LINK tranche::engine nlohmann_json::nlohmann_json fmt::fmt
  LABELS unit)
