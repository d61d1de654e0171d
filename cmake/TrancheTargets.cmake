# tranche_library(<folder> SOURCES ... [DEPENDS <folders of ours> ...] [PUBLIC_LINK ...] [PRIVATE_LINK ...])
# One static library tranche_<folder>, exported as tranche::<folder>.
function(tranche_library folder)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPENDS;PUBLIC_LINK;PRIVATE_LINK")
  set(target tranche_${folder})
  add_library(${target} STATIC ${arg_SOURCES})
  add_library(tranche::${folder} ALIAS ${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${tranche_include_dir}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  foreach(dependency ${arg_DEPENDS})
    target_link_libraries(${target} PUBLIC tranche_${dependency})
  endforeach()
  target_link_libraries(${target} PUBLIC ${arg_PUBLIC_LINK}
                        PRIVATE ${arg_PRIVATE_LINK} $<BUILD_INTERFACE:tranche_flags>)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${folder} POSITION_INDEPENDENT_CODE ON)
  set_property(GLOBAL APPEND PROPERTY tranche_libraries ${target})
endfunction()
