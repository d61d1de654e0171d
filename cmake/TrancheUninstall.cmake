# The target uninstall removes the files that the last `cmake --install` of this build folder wrote, and the folders that it made. It is
# included before anything that installs, because install rules run in the order in which they are made.
if(NOT TRANCHE_INSTALL OR NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()
set(record ${PROJECT_BINARY_DIR}/install_folders.txt)
set(folders "")
file(GLOB_RECURSE headers RELATIVE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/include/*.h)
list(TRANSFORM headers PREPEND ${CMAKE_INSTALL_INCLUDEDIR}/)
list(TRANSFORM headers REPLACE "/[^/]+$" "")
list(REMOVE_DUPLICATES headers)
foreach(folder ${headers} ${CMAKE_INSTALL_BINDIR} ${CMAKE_INSTALL_LIBDIR}/cmake/tranche ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        ${CMAKE_INSTALL_DATADIR}/tranche/examples ${CMAKE_INSTALL_DATADIR}/tranche/machines ${CMAKE_INSTALL_DATADIR}/tranche/slurm
        ${CMAKE_INSTALL_DATADIR}/doc/tranche
        ${CMAKE_INSTALL_MANDIR}/man1 ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
        ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
  while(folder)
    list(APPEND folders ${folder})
    get_filename_component(folder "${folder}" DIRECTORY)
  endwhile()
endforeach()
list(REMOVE_DUPLICATES folders)
list(JOIN folders " " folders_in_a_row)
install(CODE "
  if(NOT CMAKE_INSTALL_PREFIX MATCHES \"/_CPack_Packages/\")
    foreach(folder . ${folders_in_a_row})
      get_filename_component(folder \"\${CMAKE_INSTALL_PREFIX}/\${folder}\" ABSOLUTE)
      if(NOT EXISTS \"\$ENV{DESTDIR}\${folder}\")
        file(APPEND \"${record}\" \"\${folder}\\n\")
      endif()
    endforeach()
  endif()")
add_custom_target(uninstall COMMENT "Removing what was installed" VERBATIM
  COMMAND ${CMAKE_COMMAND} -DMANIFEST=${PROJECT_BINARY_DIR}/install_manifest.txt -DFOLDERS=${record}
          -P ${PROJECT_SOURCE_DIR}/cmake/uninstall.cmake)
