{{/* One pod of a service; in addition to "root" and "service":
  "command": command line of the container
  "isWorker": a pod of a group that has no rank 0, and so no gRPC server
*/}}
{{- define "draftwire.podTemplate" -}}
{{- $values := index .root.Values .service -}}
metadata:
  labels:
    {{- /* No version labels: a new chart version alone must not restart a pod with a large model. */}}
    {{- include "draftwire.selector" . | nindent 4 }}
    {{- with merge (deepCopy $values.podLabels) .root.Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "draftwire.name" . }}
  automountServiceAccountToken: {{ and (eq .service "gateway") (eq .root.Values.discovery "kubernetes") }}
  # Links would set variables such as DRAFTWIRE_GATEWAY_PORT=tcp://..., which the services parse as options.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds | default (include "draftwire.leastGraceSeconds" .) | int }}
  securityContext:
    {{- include "draftwire.podSecurity" . | nindent 4 }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- range $field := list "priorityClassName" "schedulerName" "runtimeClassName" }}
  {{- with get $values $field }}
  {{ $field }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "draftwire.affinity" . | fromYaml }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $own := dict "labelSelector" (dict "matchLabels" (include "draftwire.selector" $ | fromYaml)) }}
    {{- range . }}
    - {{ merge (deepCopy .) $own | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  {{- with $values.initContainers }}
  initContainers:
    {{- $security := dict "securityContext" (include "draftwire.containerSecurity" $ | fromYaml) }}
    {{- range . }}
    - {{ merge (deepCopy .) $security | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .service }}
      image: {{ include "draftwire.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: {{ .command | toJson }}
      env:
        {{- include "draftwire.environment" . | trim | nindent 8 }}
      {{- if not .isWorker }}
      ports:
        - {name: grpc, containerPort: {{ include "draftwire.port" . }}}
        {{- if eq .service "gateway" }}
        - {name: http, containerPort: 8000}
        {{- end }}
        - {name: metrics, containerPort: {{ include "draftwire.metricsPort" . }}}
      {{- include "draftwire.probes" . | nindent 6 }}
      {{- end }}
      {{- with $values.preStopSeconds }}
      lifecycle:
        preStop: {sleep: {seconds: {{ . }}}}
      {{- end }}
      resources:
        {{- include "draftwire.resources" . | nindent 8 }}
      securityContext:
        {{- include "draftwire.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "draftwire.mounts" . | trim | nindent 8 }}
  volumes:
    {{- include "draftwire.volumes" . | trim | nindent 4 }}
{{- end }}

{{- define "draftwire.podSecurity" -}}
{{- $fields := dict "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001
  "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- include "draftwire.change" (dict "of" $fields "by" (index .root.Values .service).podSecurityContext) -}}
{{ toYaml $fields }}
{{- end }}

{{- define "draftwire.containerSecurity" -}}
{{- $fields := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true
  "capabilities" (dict "drop" (list "ALL")) -}}
{{- include "draftwire.change" (dict "of" $fields "by" (index .root.Values .service).securityContext) -}}
{{ toYaml $fields }}
{{- end }}

{{/* That of the values; drafters are near verifiers too, since each round has a trip between them. */}}
{{- define "draftwire.affinity" -}}
{{- $affinity := deepCopy (index .root.Values .service).affinity -}}
{{- if eq .service "drafter" -}}
{{- with .root.Values.drafter.nearVerifiers -}}
{{- if .topologyKey -}}
{{- $labels := include "draftwire.selector" (dict "root" $.root "service" "verifier") | fromYaml -}}
{{- $term := dict "topologyKey" .topologyKey "labelSelector" (dict "matchLabels" $labels) -}}
{{- $kind := .required | ternary "requiredDuringSchedulingIgnoredDuringExecution" "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- $own := .required | ternary $term (dict "weight" 100 "podAffinityTerm" $term) -}}
{{- $pods := get $affinity "podAffinity" | default dict -}}
{{- $_ := set $pods $kind (append (get $pods $kind | default list) $own) -}}
{{- $_ := set $affinity "podAffinity" $pods -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toYaml $affinity }}
{{- end }}

{{- define "draftwire.resources" -}}
{{- $values := index .root.Values .service -}}
{{- $resources := deepCopy $values.resources -}}
{{- if eq (get $values "device") "cuda" -}}
{{- $gpus := dict .root.Values.gpuResource (include "draftwire.ranks" . | int) -}}
{{- $_ := set $resources "limits" (merge $gpus (get $resources "limits" | default dict)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* Of the metrics port, over plain HTTP: a probe starts nothing in the container. A call on the device that hangs fails
both, and only a restart helps. A gateway without a verifier fails the readiness probe alone. While the model loads, only
the startup probe counts. */}}
{{- define "draftwire.probes" -}}
{{- $startup := include "draftwire.startupSeconds" . | int -}}
startupProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add $startup 4) 5 }}
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{- define "draftwire.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/draftwire/tls, readOnly: true}
{{- end }}
{{- if eq .service "gateway" }}
{{- if .root.Values.tokens.secret }}
- {name: tokens, mountPath: /etc/draftwire/tokens, readOnly: true}
{{- end }}
{{- else }}
{{- with .root.Values.models }}
{{- if and (or .volume .claim.size) (include "draftwire.usesClaim" (merge (dict "name" "models" "claim" .claim) $)) }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if and .hub.enabled (include "draftwire.usesClaim" (merge (dict "name" "hub" "claim" .hub.claim) $)) }}
- {name: hub, mountPath: /hub}
{{- end }}
{{- end }}
{{- if gt (include "draftwire.ranks" . | int) 1 }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- end }}
{{- with (index .root.Values .service).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Secrets are mounted as folders, not by subPath, so that files change with the Secret and are reloaded. */}}
{{- define "draftwire.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "draftwire.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- if eq .service "gateway" }}
{{- with .root.Values.tokens.secret }}
- name: tokens
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- else }}
{{- with .root.Values.models }}
{{- include "draftwire.volume" (merge (dict "name" "models" "volume" .volume "claim" .claim) $) }}
{{- if .hub.enabled }}
{{- $cache := .hub.cache | default (dict "emptyDir" dict) }}
{{- include "draftwire.volume" (merge (dict "name" "hub" "volume" $cache "claim" .hub.claim) $) }}
{{- end }}
{{- end }}
{{- if gt (include "draftwire.ranks" . | int) 1 }}
# NCCL's ranks communicate through it; a container's default has 64 MiB.
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ get (index .root.Values .service) "sharedMemory" }}}
{{- end }}
{{- end }}
{{- with (index .root.Values .service).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
