# ===== apply, stage base: gpu01 gpu02 gpu03
# --- limits: limits of a login
# unless
cc_service=limits
cc_is /etc/security/limits.d/90-clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo limits` removes it.
* - memlock unlimited
* - nofile 1048576
root - memlock unlimited
root - nofile 1048576
'
# do
cc_service=limits
cc_stage /etc/security/limits.d/90-clusterctl.conf 644 '# Written by clusterctl; `clusterctl services undo limits` removes it.
* - memlock unlimited
* - nofile 1048576
root - memlock unlimited
root - nofile 1048576
'
cc_commit /etc/security/limits.d/90-clusterctl.conf
cc_done /etc/security/limits.d/90-clusterctl.conf
# ===== verify, stage base: gpu01 gpu02 gpu03
# --- limits: a login has the limits
# unless
cc_service=limits
cc_l=$(su -s /bin/sh root -c 'ulimit -l; ulimit -n' 2>/dev/null | tr '\n' ' ')
[ "${cc_l% }" = 'unlimited 1048576' ]
# do
cc_service=limits
cc_l=$(su -s /bin/sh root -c 'ulimit -l; ulimit -n' 2>/dev/null | tr '\n' ' ')
echo "a login has memlock and nofile ${cc_l% }, expected unlimited 1048576: check that pam reads limits.d"
false
