{{/* Checks that the schema cannot express. Included by the gateway's Deployment, which is always rendered, for each
target. */}}
{{- define "draftwire.checks" -}}
{{- include "draftwire.checkRelease" . -}}
{{- include "draftwire.checkNames" . -}}
{{- include "draftwire.checkModels" . -}}
{{- include "draftwire.checkTimes" . -}}
{{- include "draftwire.checkScaling" . -}}
{{- include "draftwire.checkExposure" . -}}
{{- include "draftwire.checkTargets" . -}}
{{- end }}

{{/* (dict "root" $ "says" "verifier.x: ..."): refuses values, and names the target that they are of. */}}
{{- define "draftwire.refuse" -}}
{{- with .root.target }}{{ fail (printf "targets.%s.%s" . $.says) }}{{ end -}}
{{- fail .says -}}
{{- end }}

{{/* What all targets share. */}}
{{- define "draftwire.checkRelease" -}}
{{- with .Values -}}
{{- if not (or .tls.enabled .tls.allowPlaintext) -}}
{{- fail "tls.enabled: prompts and texts would travel unencrypted, which the services refuse; set it, or tls.allowPlaintext where the network encrypts on its own" -}}
{{- end -}}
{{- if and .tls.enabled .tls.allowPlaintext -}}
{{- fail "tls.allowPlaintext: has no use with tls.enabled" -}}
{{- end -}}
{{- if and .tls.certManager.enabled (not (and .tls.enabled .tls.certManager.issuer.name)) -}}
{{- fail "tls.certManager: needs tls.enabled and issuer.name" -}}
{{- end -}}
{{- if and .tls.requireClientCert (not .tls.enabled) -}}
{{- fail "tls.requireClientCert: needs tls.enabled" -}}
{{- end -}}
{{- $own := include "draftwire.ownLabels" (dict "root" $ "service" "gateway") | fromYaml -}}
{{- range $place, $labels := dict "commonLabels" .commonLabels "gateway.podLabels" .gateway.podLabels "verifier.podLabels" .verifier.podLabels "drafter.podLabels" .drafter.podLabels -}}
{{- range $label, $_ := $labels -}}
{{- if hasKey $own $label }}{{ fail (printf "%s: %s is set by the chart" $place $label) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if and .models.volume .models.claim.size -}}
{{- fail "models.claim: models.volume already says where models are; set one of them" -}}
{{- end -}}
{{- if and .models.hub.cache .models.hub.claim.size -}}
{{- fail "models.hub.claim: models.hub.cache already says where downloads go; set one of them" -}}
{{- end -}}
{{- if and .models.hub.claim.size (not .models.hub.enabled) -}}
{{- fail "models.hub.claim: nothing is downloaded; set models.hub.enabled" -}}
{{- end -}}
{{- range $name, $claim := dict "models.claim" .models.claim "models.hub.claim" .models.hub.claim -}}
{{- if and (not $claim.size) (or $claim.perPod $claim.accessModes $claim.storageClassName) -}}
{{- fail (printf "%s: no claim is created without a size" $name) -}}
{{- end -}}
{{- if and $claim.perPod (has "ReadWriteMany" $claim.accessModes) -}}
{{- fail (printf "%s.perPod: a claim of one pod does not need ReadWriteMany" $name) -}}
{{- end -}}
{{- if and $claim.size (not $claim.perPod) (has "ReadWriteOncePod" $claim.accessModes) -}}
{{- fail (printf "%s.accessModes: several pods mount the claim, which ReadWriteOncePod forbids; set perPod, or another mode" $name) -}}
{{- end -}}
{{- end -}}
{{- if and (not .monitoring.enabled) (or .monitoring.rules.enabled .monitoring.serviceMonitor.enabled) -}}
{{- fail "monitoring.rules, monitoring.serviceMonitor: need monitoring.enabled" -}}
{{- end -}}
{{- if and .tracing.endpoint .networkPolicy.enabled (not .networkPolicy.traces.to) -}}
{{- fail "tracing.endpoint: networkPolicy.traces.to lets nobody through to it" -}}
{{- end -}}
{{- if and .tracing.endpoint .networkPolicy.enabled (not (has (regexFind "[0-9]+$" .tracing.endpoint) (toStrings .networkPolicy.traces.ports))) -}}
{{- fail "tracing.endpoint: its port is not among networkPolicy.traces.ports" -}}
{{- end -}}
{{- if and (not .tracing.endpoint) (ne (float64 .tracing.sampleRatio) 1.0) -}}
{{- fail "tracing.sampleRatio: says which requests are traced, and none are; set tracing.endpoint" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Names that objects cannot have, or that two releases would share, since they would be cut. */}}
{{- define "draftwire.checkNames" -}}
{{- $own := include "draftwire.ownName" . -}}
{{- $default := ternary .Release.Name (printf "%s-%s" .Release.Name $own) (contains $own .Release.Name) -}}
{{- $whole := .Values.fullnameOverride | default $default -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $whole) -}}
{{- fail (printf "fullnameOverride: %s is no name of a Service, which begins with a letter and has letters, digits and - alone; set another" $whole) -}}
{{- end -}}
{{- $length := add (len $whole) (ternary (add 1 (len (.target | default ""))) 0 (not (empty .target))) -}}
{{- $of := not (empty .target) | ternary (printf " of the target %s" (.target | default "")) "" -}}
{{- if gt (int $length) 40 -}}
{{- fail (printf "fullnameOverride: names%s would begin with %d characters, of 40 at most; set a shorter one" $of $length) -}}
{{- end -}}
{{- if and (gt (int .Values.verifier.tensorParallel.nodes) 1) (gt (int $length) 34) -}}
{{- fail (printf "fullnameOverride: names%s would begin with %d characters; LeaderWorkerSets, whose names grow, leave 34: set a shorter one" $of $length) -}}
{{- end -}}
{{- range (lookup "apps/v1" "Deployment" .Release.Namespace "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $isOurs := and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (hasPrefix "draftwire-" (get $labels "helm.sh/chart")) -}}
{{- if and $isOurs (ne (get $labels "app.kubernetes.io/name") $own) -}}
{{- fail (printf "nameOverride: the release was installed with %s, and another would replace all of it: uninstall it first" (get $labels "app.kubernetes.io/name")) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "draftwire.checkModels" -}}
{{- range $service := .Values.drafter.enabled | ternary (list "verifier" "drafter") (list "verifier") -}}
{{- $values := index $.Values $service -}}
{{- if and $.Values.models.claim.perPod (hasPrefix "/models/" $values.model) (not $values.initContainers) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "%s.initContainers: by models.claim.perPod each pod begins with an empty /models, which one has to fill" $service)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A pod that is killed before its drain has ended cuts off requests. */}}
{{- define "draftwire.checkTimes" -}}
{{- range $service := list "gateway" "verifier" "drafter" -}}
{{- $grace := (index $.Values $service).terminationGracePeriodSeconds -}}
{{- $least := include "draftwire.leastGraceSeconds" (dict "root" $ "service" $service) | int -}}
{{- if and $grace (lt (int $grace) $least) -}}
{{- $says := "%s.terminationGracePeriodSeconds: %d s are less than the %d s that drainSeconds%s and the end of the process take; lower drainSeconds" -}}
{{- $sleep := eq $service "gateway" | ternary ", preStopSeconds" "" -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf $says $service (int $grace) $least $sleep)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "draftwire.checkScaling" -}}
{{- with .Values -}}
{{- if mod .verifier.tensorParallel.size .verifier.tensorParallel.nodes -}}
{{- include "draftwire.refuse" (dict "root" $ "says" "verifier.tensorParallel: size has to be a multiple of nodes: each node has as many ranks") -}}
{{- end -}}
{{- if and .verifier.tensorParallel.exclusiveTopology (eq (int .verifier.tensorParallel.nodes) 1) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" "verifier.tensorParallel.exclusiveTopology: is for groups of several nodes") -}}
{{- end -}}
{{- if and (ne .verifier.podManagementPolicy "Parallel") (gt (int .verifier.tensorParallel.nodes) 1) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" "verifier.podManagementPolicy: groups of several nodes are no StatefulSet, and start in parallel") -}}
{{- end -}}
{{- with lookup "apps/v1" "StatefulSet" $.Release.Namespace (include "draftwire.name" (dict "root" $ "service" "verifier")) -}}
{{- if ne .spec.podManagementPolicy $.Values.verifier.podManagementPolicy -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "verifier.podManagementPolicy: the StatefulSet has %s, which cannot be changed; delete it with --cascade=orphan first" .spec.podManagementPolicy)) -}}
{{- end -}}
{{- end -}}
{{- if and .drafter.autoscaling.enabled (not .drafter.enabled) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" "drafter.autoscaling: needs drafter.enabled") -}}
{{- end -}}
{{- if and .verifier.autoscaling.enabled .drafter.enabled (not .drafter.autoscaling.enabled) (kindIs "invalid" .drafter.replicas) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" "verifier.autoscaling: drafters cannot follow a number of verifiers that changes; set drafter.autoscaling or drafter.replicas") -}}
{{- end -}}
{{- range $service := list "verifier" "drafter" -}}
{{- with (index $.Values $service).autoscaling -}}
{{- if and .enabled (not .prometheusAddress) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "%s.autoscaling.prometheusAddress: where is the Prometheus that scrapes the services?" $service)) -}}
{{- end -}}
{{- if and .enabled (not $.Values.monitoring.enabled) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "%s.autoscaling: reads metrics; set monitoring.enabled" $service)) -}}
{{- end -}}
{{- if ne (not .authModes) (not .authenticationRef.name) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "%s.autoscaling: authModes and authenticationRef.name need each other" $service)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $service := list "gateway" "verifier" "drafter" -}}
{{- with (index $.Values $service).autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "%s.autoscaling: minReplicas is above maxReplicas" $service)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Who forwards to the gateway has to be let in, under the names that it forwards. */}}
{{- define "draftwire.checkExposure" -}}
{{- with .Values.gateway -}}
{{- if and .service.loadBalancerSourceRanges (ne .service.type "LoadBalancer") -}}
{{- include "draftwire.refuse" (dict "root" $ "says" "gateway.service.loadBalancerSourceRanges: needs gateway.service.type LoadBalancer") -}}
{{- end -}}
{{- if and .service.loadBalancerClass (ne .service.type "LoadBalancer") -}}
{{- include "draftwire.refuse" (dict "root" $ "says" "gateway.service.loadBalancerClass: needs gateway.service.type LoadBalancer") -}}
{{- end -}}
{{- if and .ingress.enabled (not .ingress.hosts) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" "gateway.ingress.hosts: under which host names is HTTP reached?") -}}
{{- end -}}
{{- range $tls := .ingress.tls -}}
{{- range $host := $tls.hosts -}}
{{- if not (has $host $.Values.gateway.ingress.hosts) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "gateway.ingress.tls: %s is not among gateway.ingress.hosts" $host)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "httpRoute" "grpcRoute" -}}
{{- $route := index $.Values.gateway $kind -}}
{{- if and $route.enabled (not $route.parentRefs) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "gateway.%s.parentRefs: which Gateway routes here?" $kind)) -}}
{{- end -}}
{{- end -}}
{{- $ways := list -}}
{{- if .ingress.enabled }}{{ $ways = append $ways "gateway.ingress" }}{{ end -}}
{{- if .httpRoute.enabled }}{{ $ways = append $ways "gateway.httpRoute" }}{{ end -}}
{{- if .grpcRoute.enabled }}{{ $ways = append $ways "gateway.grpcRoute" }}{{ end -}}
{{- if ne .service.type "ClusterIP" }}{{ $ways = append $ways "gateway.service.type" }}{{ end -}}
{{- $outside := list -}}
{{- range $.Values.networkPolicy.clients -}}
{{- if or (hasKey . "namespaceSelector") (hasKey . "ipBlock") }}{{ $outside = append $outside . }}{{ end -}}
{{- end -}}
{{- if and $ways $.Values.networkPolicy.enabled (not $outside) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "%s: networkPolicy.clients lets in only pods of this namespace; add the namespace of who forwards, or the addresses of clients" (first $ways))) -}}
{{- end -}}
{{- with .options.http_allowed_hosts -}}
{{- $allowed := splitList "," (lower . | replace " " "") -}}
{{- $routed := concat (ternary $.Values.gateway.ingress.hosts list $.Values.gateway.ingress.enabled) (ternary $.Values.gateway.httpRoute.hostnames list $.Values.gateway.httpRoute.enabled) -}}
{{- range $host := $routed -}}
{{- if not (has $host $allowed) -}}
{{- include "draftwire.refuse" (dict "root" $ "says" (printf "gateway.options.http_allowed_hosts: requests for %s are routed here, and would be refused; add it" $host)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A gateway serves one target: what is routed to several would be answered by either. Only with the release's own
values, which have all targets. */}}
{{- define "draftwire.checkTargets" -}}
{{- $routed := dict -}}
{{- range $name, $changes := merge (dict "" dict) (.Values.targets | default dict) -}}
{{- if kindIs "map" $changes -}}
{{- $values := omit $.Values "targets" | deepCopy -}}
{{- include "draftwire.change" (dict "of" $values "by" $changes) -}}
{{- if $.Values.targets -}}
{{- $path := empty $name | ternary "" (printf "targets.%s." $name) -}}
{{- if and $name (not (hasKey (get $changes "verifier" | default dict) "model")) -}}
{{- fail (printf "%sverifier.model: which target is it? That of the release has gateways already" $path) -}}
{{- end -}}
{{- with $values.gateway -}}
{{- $entries := list -}}
{{- if .ingress.enabled -}}
{{- range .ingress.hosts }}{{ $entries = append $entries (list "ingress.hosts" . $values.gateway.ingress.className) }}{{ end -}}
{{- end -}}
{{- range $kind := list "httpRoute" "grpcRoute" -}}
{{- $route := index $values.gateway $kind -}}
{{- if $route.enabled -}}
{{- range $route.hostnames | default (list "any host") }}{{ $entries = append $entries (list $kind . $route.parentRefs $route.matches) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $entry := $entries -}}
{{- $key := toJson $entry -}}
{{- if hasKey $routed $key -}}
{{- fail (printf "%sgateway.%s: %s leads to another target already; a gateway serves one target, so each needs a host name or a match of its own" $path (first $entry) (index $entry 1)) -}}
{{- end -}}
{{- $_ := set $routed $key $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
